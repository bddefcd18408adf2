"""Rows of a comparison: kept one by one, so that a comparison that was killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zerofit.compare.catalog import Strategy
from zerofit.compare.job import CompareJob
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.files import write_json
from zerofit.spec.versions import versions

AGREES = 1e-5  # largest difference of weights in fp32 between layouts that make the same sums
SETTLED = ("ok", "not-here")
# what a row has to say; null in one that did not run
FIGURES = (
    *("samples_per_s", "tokens_per_s", "speedup", "efficiency", "peak_bytes_per_rank", "host_bytes_per_rank"),
    *("comm_bytes_per_step", "loss", "accuracy", "max_weight_difference", "batch_norm", "agrees", "staleness"),
)


class RowStore:
    """A folder with one file a row."""

    def __init__(self, output: Path | None, kind: str, asked: dict[str, Any]):
        """`asked`: with the job; the folder's name follows from it where none is given.

        Raises UserError where the folder holds another comparison, or other things.
        """
        asked = json.loads(json.dumps({"kind": kind, **asked, "versions": versions()}))
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]
        model = re.sub(r"[^\w.]+", "-", asked["job"]["model"]).strip("-")[-40:]
        self.folder = (output or Path("runs") / f"compare-{kind}-{model}-{digest}").absolute()
        file = self.folder / "asked.json"
        if self.folder.exists() and (not self.folder.is_dir() or (any(self.folder.iterdir()) and not file.exists())):
            raise _other(f"{self.folder} holds other things")
        if file.exists() and json.loads(file.read_text(encoding="utf-8")) != asked:
            raise _other(f"{self.folder} holds another comparison, or one of other versions")
        (self.folder / "rows").mkdir(parents=True, exist_ok=True)
        write_json(file, asked)

    def place(self, name: str) -> Path:
        """Where the processes of a row leave things."""
        return self.folder / "rows" / name

    def known(self, name: str) -> dict[str, Any] | None:
        """A row of before; one that failed is tried again."""
        file = self.folder / "rows" / f"{name}.json"
        if not file.exists():
            return None
        row = json.loads(file.read_text(encoding="utf-8"))
        return row if row["status"] in SETTLED else None

    def keep(self, name: str, row: dict[str, Any]) -> None:
        """Note a row."""
        write_json(self.folder / "rows" / f"{name}.json", row)


def strategy_row(
    strategy: Strategy, job: CompareJob, words: Sequence[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """One strategy's line, from what its processes have measured; `speedup` comes later."""
    row: dict[str, Any] = {
        "strategy": strategy.name,
        "title": strategy.title,
        "ranks": 1 if strategy.one else job.ranks,
        "processes": len(words),
        "synchronous": strategy.synchronous,
        "lines": strategy.lines,
        "seconds": round(seconds, 1),
        **dict.fromkeys(FIGURES),
        **failure(words),
    }
    if row["status"] != "ok":
        return row
    timed = [word for word in words if word["seconds"]]
    samples = job.global_batch * max(word["timed_steps"] for word in timed)
    samples_per_s = samples / max(word["seconds"] for word in timed)
    tokens = timed[0]["tokens_a_sample"]
    sent = None
    if all(word["sent_bytes"] is not None for word in timed):
        # what a server sends is what its workers receive; it has no steps of its own
        sent = sum(word["sent_bytes"] + bool(strategy.servers) * word["received_bytes"] for word in timed)
    judged = next(word for word in words if "loss" in word)
    difference = judged.get("max_weight_difference")
    return row | {
        "samples_per_s": samples_per_s,
        "tokens_per_s": samples_per_s * tokens if tokens else None,
        "peak_bytes_per_rank": max(word["peak_bytes"] for word in words),
        "host_bytes_per_rank": max(word["host_bytes"] for word in words),
        "comm_bytes_per_step": None if sent is None else sent / timed[0]["timed_steps"],
        "loss": judged["loss"],
        "accuracy": judged["accuracy"],
        "max_weight_difference": difference,
        "batch_norm": judged["batch_norm"],
        "agrees": difference <= AGREES if strategy.synchronous and difference is not None else None,
        "staleness": next((word["staleness"] for word in words if "staleness" in word), None),
    }


def failure(words: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Status and reason: not to be had here, failed (by the process that said why first), or well."""
    for key, status in (("not_here", "not-here"), ("error", "failed"), ("ended", "failed")):
        told = [word[key] for word in words if key in word]
        if told:
            return {"status": status, "reason": told[0]}
    return {"status": "ok", "reason": None}


def against_single(rows: Sequence[dict[str, Any]]) -> None:
    """Speed-up and efficiency of each row beside the single device's."""
    _against(rows, lambda row, base: base["strategy"] == "single")


def against_one_rank(rows: Sequence[dict[str, Any]]) -> None:
    """Speed-up and efficiency of each row beside one rank, weak and strong each by themselves."""
    _against(rows, lambda row, base: base["mode"] == row["mode"] and base["ranks"] == 1)


def _against(rows: Sequence[dict[str, Any]], is_base: Callable[[dict[str, Any], dict[str, Any]], bool]) -> None:
    good = [row for row in rows if row["status"] == "ok"]
    for row in good:
        alone = next((base for base in good if is_base(row, base)), None)
        if alone:
            row["speedup"] = row["samples_per_s"] / alone["samples_per_s"]
            row["efficiency"] = row["speedup"] / row["ranks"]


def _other(message: str) -> UserError:
    hint = "name another folder; to go on with a comparison repeat its command"
    return UserError(Problem(kind="output-exists", message=message, hint=hint, where="--output"))
