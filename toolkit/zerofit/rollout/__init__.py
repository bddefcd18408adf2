"""The memory of an inference engine, alone (`plan --serve`) and beside a training (`plan --method`)."""
