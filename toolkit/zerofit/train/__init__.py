"""Train one rank: the DeepSpeed engine, the loop and metrics. `pipeline` and `gan` have their own trainers."""
