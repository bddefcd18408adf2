"""Forecast the memory of an inference engine, alone (`plan --serve`) or with a trainer (`plan --method`)."""
