"""Strategies of `zerofit compare` on several hosts: network namespaces with a bandwidth and a delay between them.

python -m benchmarks.compare_hosts [--hosts 2] [--slots 2] [--rate 20mbit] [--delay 5] [--model lenet]

Needs root, iproute2 with tc, openssh and pdsh. Each host has an sshd of its own, and may send so much a second (by
tbf); with --delay it arrives so many milliseconds later. What goes between ranks of one host does not pass it. Where
the network is this slow it decides the times, and not how many cores there are.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import zerofit as zf
from tests.launch.hosts import hosts, missing
from zerofit.spec.files import write_json, write_text

OUT = Path(__file__).parent / "results" / "compare-hosts"
NAMES = ["data-parallel", "ddp", "all-reduce-central", "all-reduce-ring", "all-reduce-halving", "parameter-server"]
NAMES += ["model-parallel", "pipeline", "hybrid"]


def main() -> None:
    """Measure, and write results.json and table.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds until what is sent arrives")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--strategies", nargs="+", default=NAMES)
    asked = parser.parse_args()
    if why := missing():
        raise SystemExit(why)
    ranks, size = asked.hosts * asked.slots, f"{asked.hosts}x{asked.slots}"
    if asked.delay:
        size += f", {asked.delay:g} ms"
    with tempfile.TemporaryDirectory() as folder, hosts(Path(folder) / "hosts", asked.hosts, asked.delay / 1e3) as made:
        os.environ["PATH"] = made.env["PATH"]
        for node in made.nodes:
            node.slow(asked.rate)
        sizes = {"global_batch": 64, "steps": asked.steps, "eval_samples": 100}
        run = zf.Run(model=asked.model, data="digits", ranks=ranks, **sizes, output=Path(folder) / "compared")
        hostfile = made.hostfile(asked.slots)
        compared = zf.compare_strategies(
            run, strategies=asked.strategies, hostfile=hostfile, on_event=lambda event: print(event.text, flush=True)
        )
    about = {"hosts": asked.hosts, "slots": asked.slots, "rate": asked.rate, "delay": asked.delay, **sizes}
    about |= {"model": asked.model, "cores": os.cpu_count()}
    file = OUT / "results.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    kept[size] = {"about": about, "rows": [row.to_dict() for row in compared.rows]}
    OUT.mkdir(parents=True, exist_ok=True)
    write_json(file, dict(sorted(kept.items())))
    write_text(OUT / "table.md", "\n".join(table(name, one) for name, one in sorted(kept.items())))


def table(name: str, one: dict) -> str:
    """Return the Markdown of one number of hosts."""
    about = one["about"]
    lines = [f"{about['hosts']} hosts x {about['slots']} ranks, {about['rate']} from each host"]
    lines = [f"{lines[0]}, {about['delay']:g} ms late\n" if about["delay"] else f"{lines[0]}\n"]
    lines += ["| strategy | ms a step | KiB sent a step | weights differ by |", "|---|---|---|---|"]
    for row in one["rows"]:
        if row["status"] != "ok":
            lines.append(f"| `{row['strategy']}` | {row['reason']} | | |")
            continue
        sent = "" if row["comm_bytes_per_step"] is None else f"{row['comm_bytes_per_step'] / 1024:,.0f}"
        step_ms = 1e3 * about["global_batch"] / row["samples_per_s"]
        lines.append(f"| `{row['strategy']}` | {step_ms:,.1f} | {sent} | {row['max_weight_difference']:.1e} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
