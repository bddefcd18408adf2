"""From what a user names (a run, a file, a model) to a job with everything decided; no process is started."""
