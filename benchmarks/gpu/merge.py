"""The results of several calls and machines as one file each, and as the tables of the README.

python -m benchmarks.gpu.merge DIR [DIR ...] [--results benchmarks/results]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zerofit.spec.files import write_json

from .part import PARTS, read

RESULTS = Path(__file__).parents[1] / "results"
GIBI = 2**30


def main() -> None:
    """Write RESULTS/gpu-NAME.json, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="as `run --out` has filled them")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    for name in PARTS:
        path = asked.results / f"gpu-{name}.json"
        merged = merge([read(path), *(read(folder / f"{name}.json") for folder in asked.folders)])
        if merged:
            write_json(path, merged)
            print(
                "\n".join(
                    [f"\n{name}, {merged['hardware']['device']}, {merged['date']}:\n", *TABLES[name](merged["cases"])]
                )
            )


def merge(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return all cases under the newest surroundings: of each the last answer, a failure only where there is no other.

    Raises ValueError where they are of different devices: those belong into folders of their own.
    """
    merged: dict[str, Any] = {}
    for one in filter(None, found):
        cases = merged.get("cases", {})
        if merged and merged["hardware"]["device"] != one["hardware"]["device"]:
            raise ValueError(
                f"results of {merged['hardware']['device']} and of {one['hardware']['device']}: take --results"
            )
        newer = {case: answer for case, answer in one["cases"].items() if "error" not in answer or case not in cases}
        merged = {**one, "cases": {**cases, **newer}}
    return merged


def _environment(cases: dict[str, Any]) -> list[str]:
    rows = [[case, f"{answer['build_s']} s"] for case, answer in cases.items() if "build_s" in answer]
    return _table(["op", "compiled in"], rows)


def _correctness(cases: dict[str, Any]) -> list[str]:
    compared = {case: answer for case, answer in cases.items() if "agrees" in answer}
    rows = []
    for precision in ("fp32", "bf16", "fp16"):
        mine = [answer for case, answer in compared.items() if case.split()[1] == precision]
        if mine:
            worst = [f"{max(answer[k] for answer in mine):.1e}" for k in ("loss_difference", "norm_difference")]
            rows.append([precision, f"{sum(a['agrees'] for a in mine)} of {len(mine)}", *worst])
    others = [f"{case}: {answer}" for case, answer in cases.items() if case not in compared]
    return [*_table(["precision", "agree", "largest difference of a loss", "of a norm"], rows), "", *others]


def _tests(cases: dict[str, Any]) -> list[str]:
    bad = [f"- {name}: {text}" for one in cases.values() for name, text in one["outcomes"].items() if text != "passed"]
    return [*(one["summary"] for one in cases.values()), *bad]


def _training(cases: dict[str, Any]) -> list[str]:
    names = {"allocated_bytes": "allocated", "reserved_bytes": "reserved", "used_bytes": "nvidia-smi", "step_s": "step"}
    rows, sizes = [], {name: [] for name in names}
    for case, answer in cases.items():
        if "real" not in answer:
            rows.append([case, answer.get("error", "does not fit by simulation").strip().splitlines()[-1]])
            continue
        row = [
            case,
            f"{answer['real']['allocated_bytes'] / GIBI:.2f} GiB",
            f"{statistics.median(answer['real']['step_s']):.3f} s",
        ]
        for name in names:
            error = answer["errors"].get(name)
            row.append("" if error is None else f"{error:+.2%}")
            sizes[name] += [] if error is None else [abs(error)]
        rows.append(row)
    medians = [f"{statistics.median(s):.2%} ({max(s):.1%})" if s else "" for s in sizes.values()]
    head = ["run", "allocated", "step", *(f"forecast's error: {title}" for title in names.values())]
    return [*_table(head, [*rows, ["median (largest)", "", "", *medians]]), *_kernels(cases)]


def _kernels(cases: dict[str, Any]) -> list[str]:
    """Return a table of kernels' seconds by class in a step of each run: forecast / measured, in milliseconds."""
    both = {
        case: (answer["forecast"]["kernels"], answer["real"]["kernels"])
        for case, answer in cases.items()
        if "real" in answer and "kernels" in answer.get("forecast", {})
    }
    if not both:
        return []
    kinds = list(dict.fromkeys(kind for pair in both.values() for one in pair for kind in one))
    rows = [
        [case, *(" / ".join(f"{1e3 * one[kind]:.1f}" if kind in one else "-" for one in pair) for kind in kinds)]
        for case, pair in both.items()
    ]
    return ["", *_table(["ms of a step: forecast / measured", *kinds], rows)]


def _edges(cases: dict[str, Any]) -> list[str]:
    rows = [
        [
            case,
            side.replace("_", " "),
            str(found["micro_batch"]),
            found["verdict"],
            "ran" if found["ran"] else "out of memory",
        ]
        for case, answer in cases.items()
        for side, found in answer.items()
        if isinstance(found, dict)
    ]
    return _table(["run", "side", "micro batch", "simulate", "real"], rows)


def _scripts(cases: dict[str, Any]) -> list[str]:
    rows = [[case, *(f"{e:+.2%}" for e in answer.get("errors", {}).values())] for case, answer in cases.items()]
    return _table(["script", "allocated", "reserved"], rows)


def _rates(cases: dict[str, Any]) -> list[str]:
    """Return for each kind of kernel and dtype how many shapes were measured, and the lowest and highest rate."""
    rows = []
    for case, answer in cases.items():
        name, unit = ("flops", 1e12) if "flops" in answer.get("rows", [{}])[0] else ("bytes", 1e9)
        rates = [one[name] / one.get("forward_s", one.get("seconds")) / unit for one in answer.get("rows", [])]
        words = f"{min(rates):,.1f} to {max(rates):,.0f} {'TFLOP/s' if name == 'flops' else 'GB/s'}" if rates else ""
        rows.append([case, str(len(rates)), words])
    return _table(["kernels", "shapes", "forward"], rows)


def _speed(cases: dict[str, Any]) -> list[str]:
    rows = []
    for case, answer in cases.items():
        if "zerofit_over" in answer:
            ratios = [f"{peer} {over['median']:.3f}" for peer, over in answer["zerofit_over"].items()]
            rows.append(
                [case, f"{answer['median']['zerofit']:,.0f} {answer['unit']}", "zerofit over " + ", ".join(ratios)]
            )
        elif "samples_per_s" in answer:
            tokens = answer.get("tokens_per_s")
            amount = f"{tokens:,.0f} tokens/s" if tokens else f"{answer['samples_per_s']:,.0f} samples/s"
            rows.append([case, amount, f"MFU {answer['mfu']:.1%}" if "mfu" in answer else ""])
    return _table(["what", "throughput", ""], rows)


TABLES = {
    "environment": _environment,
    "correctness": _correctness,
    "tests": _tests,
    "training": _training,
    "kernels": _rates,
    "edges": _edges,
    "scripts": _scripts,
    "speed": _speed,
}


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join([*row, *[""] * (len(head) - len(row))]) + " |" for row in lines]


if __name__ == "__main__":
    main()
