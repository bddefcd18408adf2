"""Read the log of any program: its lines without launchers' prefixes, and their ranks."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import zlib
from dataclasses import dataclass
from io import BufferedIOBase
from itertools import zip_longest
from pathlib import Path

from zerofit.spec.foreign import Unreadable

MOST_BYTES = 64 << 20  # bytes of a log; of a longer log only the beginning and the end are explained
HEAD_BYTES = 8 << 20
CHUNK_BYTES = 1 << 20

TRACEBACK = "Traceback (most recent call last)"
LONGEST_TRACEBACK = 400  # lines

_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
# first bytes of a compressed file -> how to open it
_OPENERS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
_ARCHIVES = (b"PK\x03\x04", b"\x28\xb5\x2f\xfd")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b\x0c\x0e-\x1f]")
# Prefixes that launchers put before each line: torchrun (also --tee), mpirun, srun -l, Ray and vLLM (its errors have a
# time and a place, too), kubectl, and the host name of pdsh and docker compose. A Python class, as in
# "torch.OutOfMemoryError: ...", and Ascend's error codes, as in "EI0002: ...", are no host names.
_PREFIX = re.compile(
    r"""\ *(?:
      \[(?:rank|default|local_rank)?\ ?(?P<rank>\d+)\]:\ ?
    | \[\d+,(?P<mpi>\d+)\]<\w+>:\ ?
    | (?P<srun>\d+):[ ]
    | \((?P<actor>\w[^()]*\bpid=\d+[^()]*)\)[ ]
    | (?P<host>(?=[\w.-]*\d)(?!E[A-Z]\d+:)[A-Za-z][\w.-]*(?<!Error)(?<!\.error)(?<!Exception)(?<!Warning))(?::|\ +\|)[ ]
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
    """Return the lines of a log, which may be compressed (.gz, .bz2, .xz).

    A very long log lacks its middle. Raises OSError, or Unreadable for another archive and for a damaged file.
    """
    with path.open("rb") as plain:
        start = plain.read(6)
    if start.startswith(_ARCHIVES):
        raise Unreadable("it is an archive: unpack it first")
    opener = next((opener for mark, opener in _OPENERS.items() if start.startswith(mark)), open)
    with opener(path, "rb") as file:
        return lines_of(decoded_log(read_ends(file)))


def read_ends(file: BufferedIOBase) -> bytes:
    """Return the content of a log, without the middle if it is very long.

    Of an incomplete archive, return the beginning. Raises OSError, or Unreadable if nothing can be read.
    """
    content = bytearray()
    try:
        while chunk := file.read1(CHUNK_BYTES):
            content += chunk
            if len(content) > 2 * MOST_BYTES:
                _remove_middle(content)
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile):
        if not content:
            raise Unreadable("it is a damaged archive") from None
    if len(content) > MOST_BYTES:
        _remove_middle(content)
    return bytes(content)


def _remove_middle(content: bytearray) -> None:
    # The negative end keeps the last MOST_BYTES - HEAD_BYTES bytes. The error is at the end, and settings at the
    # beginning.
    content[HEAD_BYTES : HEAD_BYTES - MOST_BYTES] = b"\n"


def decoded_log(content: bytes) -> str:
    """Decode a log in UTF-8, or in UTF-16, which PowerShell writes. Replace invalid bytes."""
    encoding = "utf-16" if content.startswith(_UTF_16) else "utf-8-sig"
    return content.decode(encoding, errors="replace")


def lines_of(text: str) -> list[LogLine]:
    """Split a log's text into lines, without prefixes of launchers and loggers."""
    found = []
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        for part in line.split("\r"):  # progress bars overwrite themselves
            rank, part = "", part if part.isprintable() else _CONTROL.sub("", part)
            # Prefixes nest: srun puts its own before that of torchrun. The innermost one names the rank.
            while match := _PREFIX.match(part):
                names = match.groupdict().values()
                rank, part = next(filter(None, names), rank), part[match.end() :]
            found.append(LogLine(number, part, rank))
    return _without_loggers(found)


def _without_loggers(lines: list[LogLine]) -> list[LogLine]:
    """Remove what a logger writes before each line of a traceback, such as time and level."""
    # The text before the traceback's title is this prefix if the next line has it too. Numbers in it may differ.
    found = list[LogLine]()
    prefix, last = None, 0
    for line, following in zip_longest(lines, lines[1:]):
        before, title, _ = line.text.partition(TRACEBACK)
        if title and (before := before.rstrip("╭─ ")):
            shape = re.compile(r"\d+".join(re.escape(part) for part in re.split(r"\d+", before)) + " ?")
            if following and shape.match(following.text):
                prefix, last = shape, line.number + LONGEST_TRACEBACK
        if prefix and line.number < last and (match := prefix.match(line.text)):
            rank = line.rank or "".join(re.findall(r"\brank ?(\d+)", match[0])[:1])
            line = LogLine(line.number, line.text[match.end() :], rank)
        found.append(line)
    return found
