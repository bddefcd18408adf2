"""What the kernel counts of this process's connections."""

from __future__ import annotations

import socket
import time

from zerofit.spec.process import flows


def test_bytes_that_flow_through_connections():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        before = flows()
        assert not any(flow.resending for flow in before.values())
        one.sendall(b"x" * 100_000)
        got = 0
        while got < 100_000:
            got += len(other.recv(1 << 16))
        time.sleep(0.1)
        now = flows()
        assert max(flow.sent - before[name].sent for name, flow in now.items() if name in before) == 100_000
        assert max(flow.received - before[name].received for name, flow in now.items() if name in before) == 100_000
        other.close()


def test_what_waits_in_a_connection_is_written_and_not_yet_sent():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        before = flows()
        one.setblocking(False)
        written = one.send(b"x" * 30_000_000)  # nobody reads: buffers take some of it
        now = flows()
        flow = max((flow for name, flow in now.items() if name in before), key=lambda flow: flow.written)
        assert flow.written == written > flow.sent
        other.close()
