"""Questions to one process on one host, and its answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from zerofit.doctor.serve import MARK
from zerofit.doctor.unreachable import Unreachable, why

PATIENCE_S = 20.0  # of one answer; a cold network file system takes seconds to start Python
END_S = 2.0


@dataclass
class Conversation:
    """One process on one host that answers questions."""

    host: str
    process: asyncio.subprocess.Process
    noise: asyncio.Task[bytes]  # its standard error
    clock_s: float = 0.0  # its clock minus ours at the last answer
    clock_error_s: float = 0.0  # at most

    async def ask(
        self, question: dict[str, Any], patience_s: float = PATIENCE_S, say: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """The answer; what is said on the way there goes to `say`. Raises Unreachable."""
        sent = time.time()
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            await self.process.stdin.drain()
            async with asyncio.timeout(patience_s):
                while "progress" in (answer := await self._line()):
                    if say:
                        say(answer["progress"])
        except (TimeoutError, OSError) as error:
            raise await self._failure(error, patience_s) from None
        got, (heard, answered) = time.time(), answer["clock"]
        self.clock_s = ((heard - sent) + (answered - got)) / 2  # as in NTP
        self.clock_error_s = max(0.0, (got - sent) - (answered - heard)) / 2
        return answer

    async def greeting(self) -> None:
        """Wait until it is there. Raises Unreachable."""
        try:
            await asyncio.wait_for(self._line(), PATIENCE_S)
        except (TimeoutError, OSError) as error:
            raise await self._failure(error, PATIENCE_S) from None

    async def _line(self) -> dict[str, Any]:
        """The next line that is ours: a shell there may print what it likes. Raises ConnectionResetError at the end."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            _, mark, answer = line.partition(MARK.encode())
            if mark:
                return json.loads(answer)
        raise ConnectionResetError

    async def _failure(self, error: Exception, patience_s: float) -> Unreachable:
        if isinstance(error, TimeoutError):
            return Unreachable("timeout", f"no answer in {patience_s:.0f} s", "look whether it is overloaded or hangs")
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), END_S)
        said = (await self.noise).decode(errors="replace") if self.process.returncode is not None else ""
        return why(self.host, self.process.returncode, said)

    async def close(self) -> None:
        """Let it end, or end it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            await asyncio.wait_for(self.process.wait(), END_S)
        finally:
            if self.process.returncode is None:
                self.process.kill()
            self.noise.cancel()
