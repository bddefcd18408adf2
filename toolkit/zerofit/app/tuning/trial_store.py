"""Trials on the disk, by what is run, on what and with which versions: a tuning that was killed goes on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from zerofit.app.tuning.job import TuneJob
from zerofit.spec.cache import cache_root
from zerofit.spec.versions import versions
from zerofit.tune.trial import Trial

# fields of the run that a candidate sets, or that do not change the time of a step
FREE = {
    *("ranks", "micro_batch", "gradient_accumulation_steps", "tensor_parallel", "pipeline", "sequence_parallel"),
    *("activation_checkpointing", "precision", "global_batch", "compile", "steps", "epochs", "output", "resume"),
    *("seed", "lr", "log_every", "eval_every", "eval_samples", "save_every", "save_async", "keep_last", "keep_every"),
    "callbacks",
    *("tensorboard", "wandb", "ds_config", "warmup_steps", "schedule", "weight_decay", "heartbeat_timeout"),
}


class TrialStore:
    """A file of trials, one a line."""

    def __init__(self, job: TuneJob):
        run = {k: v for k, v in job.run.model_dump(mode="json").items() if k not in FREE}
        config = {k: v for k, v in job.ds_source.items() if k != "zero_optimization"}
        hosts = [[host.name, host.slots] for host in job.hosts]
        environment = [flag for flag in job.host_flags if "--env" in flag]
        place = [job.device, job.candidates[0].layout.world_size, hosts, environment]
        content = json.dumps([run, config, place, versions()], sort_keys=True, default=str)
        self._keys = {candidate.key for candidate in job.candidates}
        self.path: Path = cache_root() / "tune" / f"{hashlib.sha256(content.encode()).hexdigest()[:20]}.jsonl"

    def trials(self) -> list[Trial]:
        """Return earlier trials of the candidates, without a line that a kill has cut."""
        if not self.path.exists():
            return []
        found = {}
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                trial = Trial(**json.loads(line))
            except (ValueError, TypeError):
                continue
            if trial.key in self._keys:
                found[trial.key] = trial
        return list(found.values())

    def keep(self, trial: Trial) -> None:
        """Add a trial, unless only its time was over, which says nothing about the configuration."""
        if trial.status == "stopped":
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut = self.path.exists() and self.path.stat().st_size > 0 and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * cut + json.dumps(trial.to_dict()) + "\n")
