"""What `zerofit explain` does: why a run went out of memory, from its log, its memory snapshot or its folder."""

from __future__ import annotations

import sys
from pathlib import Path

from zerofit.explain.from_log import explain_log
from zerofit.explain.from_snapshot import explain_snapshot
from zerofit.explain.log import MOST_BYTES, LogLine, decoded_log, lines_of, read_log
from zerofit.explain.result import UNKNOWN, Explanation
from zerofit.explain.unpickle import is_pickle
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.foreign import refused

STANDARD_INPUT = "-"
HINT = "give a log, a memory snapshot (torch.cuda.memory._dump_snapshot), a run folder, or - for standard input"


def explain(what: str | Path, *, on_event: OnEvent | None = None) -> Explanation:
    """Explain why a run went out of memory: the cause, the line that asked, and what makes room.

    Args:
        what: the log of any program, a memory snapshot of torch, or a run folder; "-" is a log on standard input.
        on_event: gets progress.

    Raises UserError if the file cannot be read.

    >>> import zerofit as zf
    >>> from pathlib import Path
    >>> error = "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.90 GiB total capacity; 9.10 GiB already "
    >>> error += "allocated; 0.20 GiB free; 15.10 GiB reserved in total by PyTorch)"
    >>> _ = Path("train.log").write_text(f"RuntimeError: {error}")
    >>> explanation = zf.explain("train.log")
    >>> explanation.cause, explanation.changes[0].change
    ('fragmentation', 'PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the command (costs no speed)')
    """
    if str(what) != STANDARD_INPUT and _is_snapshot(Path(what)):
        Reporter(on_event).status("reading the snapshot ...")
        with refused(Path(what), hint=HINT, where="WHAT"):
            return explain_snapshot(Path(what))
    return explain_log(_lines(what)) or Explanation(
        source="log",
        cause=UNKNOWN,
        place="",
        summary="The log has no message about missing memory.",
        run_next="give the output of every rank, with standard error: COMMAND 2>&1 | tee train.log",
    )


def _is_snapshot(path: Path) -> bool:
    with refused(path, hint=HINT, where="WHAT"):
        return is_pickle(path)


def _lines(what: str | Path) -> list[LogLine]:
    if str(what) == STANDARD_INPUT:
        return lines_of(decoded_log(sys.stdin.buffer.read(MOST_BYTES)))
    with refused(Path(what), hint=HINT, where="WHAT"):
        return read_log(Path(what))
