"""Read the log of any program: its lines without launchers' prefixes, and the rank that wrote each line."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 64 << 20  # bytes of a log; of a longer log only the beginning and the end are read
HEAD_BYTES = 8 << 20

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b\x0c\x0e-\x1f]")
# Prefixes that launchers put before each line: torchrun (also --tee), mpirun, srun -l, Ray and vLLM (its errors have a
# time and a place, too), kubectl, and the host name of pdsh and docker compose. A Python class, as in
# "torch.OutOfMemoryError: ...", is not a host name.
_PREFIX = re.compile(
    r"""\ *(?:
      \[(?:rank|default|local_rank)?\ ?(?P<rank>\d+)\]:\ ?
    | \[\d+,(?P<mpi>\d+)\]<\w+>:\ ?
    | (?P<srun>\d+):[ ]
    | \((?P<actor>\w[^()]*\bpid=\d+[^()]*)\)[ ]
    | (?P<host>(?=[\w.-]*\d)[A-Za-z][\w.-]*(?<!Error)(?<!Exception)(?<!Warning))(?::|\ +\|)[ ]
    | \d{4}-\d\d-\d\dT[\d:.]+Z[ ]
    | ERROR[ ]\d\d-\d\d[ ][\d:]{8}[ ]\[[\w./]+:\d+\][ ]
    )""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log."""

    number: int  # from 1
    text: str  # without the launcher's prefix and colors
    rank: str  # "3", or the host's or worker's name; "" without a prefix


def read_log(path: Path) -> list[LogLine]:
    """Return a log's lines, without the middle of a very long log. Raises OSError."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES)
        rest = os.fstat(file.fileno()).st_size - len(content)
        if rest > 0:
            file.seek(-(MOST_BYTES - HEAD_BYTES), os.SEEK_END)
            content = content[:HEAD_BYTES] + b"\n" + file.read()
    return lines_of(decoded_log(content))


def decoded_log(content: bytes) -> str:
    """Decode a log in UTF-8, or in UTF-16, which PowerShell writes. Invalid bytes become replacement characters."""
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return content.decode(encoding, errors="replace")


def lines_of(text: str) -> list[LogLine]:
    """Split a log's text into lines, also at carriage returns, with which progress bars overwrite themselves."""
    found = []
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        for part in line.split("\r"):
            found.append(_line(number, _CONTROL.sub("", part)))
    return found


def _line(number: int, text: str) -> LogLine:
    rank = ""
    while match := _PREFIX.match(text):
        found = next((value for value in match.groupdict().values() if value), "")
        rank, text = found or rank, text[match.end() :]
    return LogLine(number, text, rank)
