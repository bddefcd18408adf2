"""Turn a run, file or model that a user names into a job with all values decided."""
