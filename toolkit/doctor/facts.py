"""What one host is like, asked over its standard input: no torch is imported, so that it answers in 0.3 s.

`python -P -m zerofit.doctor.facts` greets with a line, then answers each line of JSON with one, until its input ends.
Answers start with `MARK`, since a remote shell may print greetings of its own. The questions:

    {"ask": "facts", "run_folder", "token", "run_file", "code": paths, each may be missing}     everything below
    {"ask": "listen", "port": 29500}             listen there until the end (0: any free port)
    {"ask": "reach", "targets": [["10.0.0.1", 29500], ...]}     connect to each
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from zerofit.doctor import gpus, network, places, software, system

MARK = "zerofit-facts "
LIFE_S = 120  # after which it ends whatever happens: nothing is left on a host


def collect(question: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
    """Everything about this host. What the stack holds is taken away when it closes."""
    with ThreadPoolExecutor(1) as pool:
        graphics = pool.submit(gpus.gpus)  # nvidia-smi takes its time
        found = {
            "hostname": socket.gethostname(),
            "python": sys.executable,
            "versions": software.versions(),
            "code": {"zerofit": software.own_code(), "model": _of(question.get("code"), software.code_hash)},
            "run_file": _of(question.get("run_file"), software.file_hash),
            "addresses": network.addresses(),
            "asked_from": network.asked_from(),
            "memory": system.memory(),
            "shared_memory": system.shared_memory(),
            "limits": system.limits(),
            "tools": system.tools(),
            "libaio": system.libaio(),
            "strays": system.strays(),
            "cores": system.cores(),
            "run_folder": _of(question.get("run_folder"), lambda path: _look(path, str(question["token"]), stack)),
        }
        return found | graphics.result()


def _of(path: str | None, work: Any) -> Any:
    return None if path is None else work(Path(path))


def _look(path: Path, token: str, stack: ExitStack) -> dict[str, Any]:
    place = places.Place(path, token)
    stack.callback(place.clear)
    return place.look()


def _listen(question: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
    try:
        server = stack.enter_context(network.listen(int(question["port"])))
    except OSError:
        return network.listening(int(question["port"]))
    return {"error": None, "port": server.getsockname()[1]}


def _reach(question: dict[str, Any]) -> dict[str, Any]:
    targets = [(str(host), int(port)) for host, port in question["targets"]]
    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        return {"reached": list(pool.map(lambda target: network.reach(*target), targets))}


def answer(question: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
    """The answer to one question, with this host's clock when it was heard and answered (Unix time, s)."""
    heard = time.time()
    asked = question.get("ask")
    if asked == "facts":
        found = collect(question, stack)
    elif asked == "listen":
        found = _listen(question, stack)
    elif asked == "reach":
        found = _reach(question)
    else:
        found = {"error": f"unknown question {asked!r}"}
    return {**found, "clock": [heard, time.time()]}


def main() -> None:
    """Greet, and answer until the asking command closes its end."""
    signal.alarm(LIFE_S)
    os.umask(0o077)
    print(MARK + "{}", flush=True)
    with ExitStack() as stack:
        for line in sys.stdin:
            print(MARK + json.dumps(answer(json.loads(line), stack)), flush=True)


if __name__ == "__main__":
    main()
