"""Non-blocking lines of JSON over a stream socket."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from zerofit.spec.foreign import Unreadable, parse_json

CHUNK = 65536
MOST_IDLE_S = 32_767  # Linux's largest TCP_KEEPIDLE and TCP_KEEPINTVL (MAX_TCP_KEEPIDLE in include/net/tcp.h)
LONGEST = 1 << 20  # limit in bytes of a line and of unread data; zerofit's own peers stay below


class ConnectionLost(Exception):
    """Raised when the other side is gone."""


class JsonLineSocket:
    """A connection for JSON objects, one per line. `send` and `receive` do not wait."""

    def __init__(self, connection: socket.socket, timeout_s: float):
        """Use a connection, which is lost if the other host does not answer for `timeout_s` seconds."""
        self.socket, self.longest = connection, LONGEST  # limit of the next line
        connection.setblocking(False)
        # the kernel probes an idle connection, and gives up on unanswered data, so a dead host is noticed in time
        if connection.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                connection.setsockopt(socket.IPPROTO_TCP, option, min(MOST_IDLE_S, max(1, int(timeout_s / 4))))
        self._in, self._out = b"", b""

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self.socket.fileno()

    def send(self, value: dict[str, object]) -> None:
        """Send a line, buffering what the kernel does not accept yet. Raises ConnectionLost."""
        self._out += json.dumps(value).encode() + b"\n"
        self.flush()
        if len(self._out) > LONGEST:
            raise ConnectionLost("the other process does not read its messages")

    def flush(self) -> None:
        """Retry sending buffered data. Raises ConnectionLost."""
        try:
            while self._out:
                self._out = self._out[self.socket.send(self._out) :]
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield complete lines.

        Raises ConnectionLost if the other side has closed, or for invalid JSON.
        """
        # stop reading at the limit, so a peer cannot fill this process's memory
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
                raise ConnectionLost("line too long")
            try:
                value = parse_json(line)
            except Unreadable as error:
                raise ConnectionLost("invalid JSON") from error
            if not isinstance(value, dict):
                raise ConnectionLost("not a JSON object")
            yield value
        if len(self._in) > self.longest:
            raise ConnectionLost("line too long")
        if closed:
            raise ConnectionLost("closed")

    def finish(self, seconds: float) -> None:
        """Close the connection once the other side has read everything, or after `seconds`."""
        # closing with unread data resets a connection, and the data sent last may be lost (RFC 2525, 2.17)
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
        """Close the connection at once."""
        self.socket.close()
