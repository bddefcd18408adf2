"""Parts of `tune_regret.py`: the exhaustive sweep, DeepSpeed's own autotuner, trials that are made to fail."""
