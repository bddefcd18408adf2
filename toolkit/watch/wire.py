"""Lines of JSON over a stream socket, on both sides without waiting."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

CHUNK = 65536
LONGEST = 1 << 20  # bytes of one line: a peer that sends more is none of ours


class Lost(Exception):
    """The other side is gone."""


class Wire:
    """One connection."""

    def __init__(self, connection: socket.socket, timeout_s: float):
        """`timeout_s`: after so long without an answer of the other side's kernel the connection counts as lost."""
        self.socket = connection
        connection.setblocking(False)
        if connection.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
        self._in, self._out = b"", b""

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, value: dict[str, Any]) -> None:
        """Hand a line to the kernel, or keep what it does not take for the next call. Raises Lost."""
        self._out += json.dumps(value).encode() + b"\n"
        self.flush()

    @property
    def waiting(self) -> bool:
        """Whether something has not been taken by the kernel."""
        return bool(self._out)

    def flush(self) -> None:
        """Try again to send what is waiting. Raises Lost."""
        try:
            while self._out:
                self._out = self._out[self.socket.send(self._out) :]
        except BlockingIOError:
            return
        except OSError as error:
            raise Lost(str(error)) from error

    def receive(self) -> Iterator[dict[str, Any]]:
        """Whole lines that have come. Raises Lost where the other side has closed, and for what is no JSON object."""
        closed = False
        while True:
            try:
                data = self.socket.recv(CHUNK)
            except BlockingIOError:
                break
            except OSError as error:
                raise Lost(str(error)) from error
            if not data:
                closed = True
                break
            self._in += data
            if len(self._in) > LONGEST:
                raise Lost("a line without an end")
        *lines, self._in = self._in.split(b"\n")
        for line in lines:
            try:
                value = json.loads(line)
            except ValueError as error:
                raise Lost("no JSON") from error
            if not isinstance(value, dict):
                raise Lost("no JSON object")
            yield value
        if closed:
            raise Lost("closed")

    def close(self) -> None:
        """End the connection."""
        self.socket.close()
