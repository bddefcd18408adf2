"""Trials that are kept: by what is run, on what, with which versions, so that a tuner that was killed goes on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from zerofit.app.tuning.job import TuneJob
from zerofit.spec.cache import cache_root
from zerofit.spec.versions import versions
from zerofit.tune.trial import Trial

# what a candidate sets, or what does not change a step's time
FREE = {
    *("ranks", "micro_batch", "gradient_accumulation_steps", "tensor_parallel", "pipeline", "sequence_parallel"),
    *("activation_checkpointing", "precision", "global_batch", "compile", "steps", "epochs", "output", "resume"),
    *("seed", "lr", "log_every", "eval_every", "eval_samples", "save_every", "save_async", "keep_last", "keep_every"),
    *("tensorboard", "wandb", "ds_config", "warmup_steps", "schedule", "weight_decay", "heartbeat_timeout"),
}


class TrialStore:
    """A file of trials, one a line."""

    def __init__(self, job: TuneJob):
        run = {k: v for k, v in job.run.model_dump(mode="json").items() if k not in FREE}
        config = {k: v for k, v in job.ds_source.items() if k != "zero_optimization"}
        hosts = [[host.name, host.slots] for host in job.hosts]
        place = [job.device, job.candidates[0].layout.world_size, hosts, [w for w in job.host_flags if "--env" in w]]
        content = [run, config, place, versions()]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:20]
        self._keys = {candidate.key for candidate in job.candidates}
        self.path: Path = cache_root() / "tune" / f"{digest}.jsonl"

    def trials(self) -> list[Trial]:
        """Those of before, of configurations that may be tried now; a line that a kill has cut is left out."""
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
        """Add one; not where only the time was over, which says nothing of the configuration."""
        if trial.status == "stopped":
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * self._cut() + json.dumps(trial.to_dict()) + "\n")

    def _cut(self) -> bool:
        """Whether the last line has no end."""
        return self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size > 0
