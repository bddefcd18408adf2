"""Lines of JSON over a stream socket, on both sides without waiting."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from zerofit.spec.foreign import Unreadable, parse_json

CHUNK = 65536
LONGEST = 1 << 20  # bytes of one line, and of what a peer leaves unread: one that goes beyond is none of ours


class ConnectionLost(Exception):
    """The other side is gone."""


class JsonLineSocket:
    """One connection."""

    def __init__(self, connection: socket.socket, timeout_s: float):
        """Take over a connection, lost when the other side's kernel has not answered for `timeout_s` seconds."""
        self.socket, self.longest = connection, LONGEST  # bytes of the next line
        connection.setblocking(False)
        if connection.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                connection.setsockopt(socket.IPPROTO_TCP, option, max(1, int(timeout_s / 4)))
        self._in, self._out = b"", b""

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self.socket.fileno()

    def send(self, value: dict[str, Any]) -> None:
        """Hand a line to the kernel, or keep what it does not take for the next call. Raises ConnectionLost."""
        self._out += json.dumps(value).encode() + b"\n"
        self.flush()
        if len(self._out) > LONGEST:
            raise ConnectionLost("nothing is read there")

    def flush(self) -> None:
        """Try again to send what is waiting. Raises ConnectionLost."""
        try:
            while self._out:
                self._out = self._out[self.socket.send(self._out) :]
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self) -> Iterator[dict[str, Any]]:
        """Return whole lines that have come. Raises ConnectionLost once the other side has closed, or for no JSON."""
        closed = False
        while len(self._in) <= self.longest:
            try:
                data = self.socket.recv(CHUNK)
            except BlockingIOError:
                break
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            if not data:
                closed = True
                break
            self._in += data
        *lines, self._in = self._in.split(b"\n")
        for line in lines:
            if len(line) > self.longest:
                raise ConnectionLost("a line that is too long")
            try:
                value = parse_json(line)
            except Unreadable as error:
                raise ConnectionLost("no JSON") from error
            if not isinstance(value, dict):
                raise ConnectionLost("no JSON object")
            yield value
        if len(self._in) > self.longest:
            raise ConnectionLost("a line that is too long")
        if closed:
            raise ConnectionLost("closed")

    def finish(self, seconds: float) -> None:
        """End the connection once the other side has read everything, or after so long.

        Closed with something unread in it, a connection is reset, and what was sent last may be lost (RFC 2525, 2.17).
        """
        with suppress(OSError, ConnectionLost):
            self.socket.setblocking(True)
            self.socket.settimeout(seconds)
            self.socket.sendall(self._out)
            self.socket.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and self.socket.recv(CHUNK):
                pass
        self.close()

    def close(self) -> None:
        """End the connection at once."""
        self.socket.close()
