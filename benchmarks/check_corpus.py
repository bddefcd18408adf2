"""`zerofit check` on a folder of DeepSpeed JSONs that people use, held against what the programs do with them.

python benchmarks/check_corpus.py CASES.json [--output FILE.json]

CASES.json is a list; the files lie in the folder of its name beside it. A case of `file`, `deepspeed_config`,
`engine_one_cpu_rank` and, for files with "auto", `training_arguments` says "ok" or the error of each. A case of `id`,
`args`, `expect`, `fault` and `want` is a known fault: the flags of the command, the codes of which one should be found,
and words in which people have spoken of it. The lines that it may be found in are those of the keys that these words
name, by name or by value ("16 != ..."), each with the lines of its section; a key that is missing stands in line 1.

The meaning of a file is what `DeepSpeedConfig` makes of it, every "auto" left out: `--fix` has to keep it where
DeepSpeed took the file, and where it did not, to keep every value that the file has.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from zerofit.app.checking import CheckResult, check
from zerofit.check.catalog import catalog
from zerofit.check.check import check as find_all
from zerofit.check.document import Document, parse
from zerofit.check.dotted import autos, drop, leaves
from zerofit.check.keys import is_off
from zerofit.check.scan import ObjectMember, ParsedValue
from zerofit.spec.errors import UserError
from zerofit.spec.run import load_run

PROGRAMS = ("deepspeed_config", "engine_one_cpu_rank", "training_arguments")
# what a machine without GPUs and compilers says, not the file's fault
MACHINE = ("on CPU backend", "Unable to JIT load", "cpu_adam op", "for CUDA accelerator", "TO: timeout")
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--output", type=Path, help="write the comparison as JSON")
    options = parser.parse_args()
    cases = json.loads(options.cases.read_text())
    folder = options.cases.with_suffix("")
    if "id" in cases[0]:
        rows = [_fault(folder / f"{case['id']}.json", case) for case in cases]
        with_line = [row["at its line"] for row in rows if "at its line" in row]
        figures: dict[str, Any] = {"faults": len(rows), "found": sum(row["found"] for row in rows)}
        figures |= {"with a line": len(with_line), "at its line": sum(with_line)}
    else:
        started = time.monotonic()
        results = {case["file"]: _checked(folder / case["file"]) for case in cases}
        seconds = time.monotonic() - started
        rows = [_file(case, results[case["file"]]) for case in cases]
        figures = _figures(rows) | {"seconds": round(seconds, 1)}
    for row in rows:
        if row["remarks"]:
            print(row["file"], *row["remarks"], sep="\n    ")
    print(json.dumps(figures, indent=2))
    if options.output:
        options.output.write_text(json.dumps({"figures": figures, "rows": rows}, indent=2) + "\n")


def _checked(path: Path, flags: list[str] | None = None) -> CheckResult | UserError:
    """Check a file as the command does with these flags."""
    words = dict(zip(flags[::2], flags[1::2], strict=True)) if flags else {}
    gpu = words.pop("--gpu", None)
    try:
        return check(path, load_run(None, {k[2:].replace("-", "_"): v for k, v in words.items()}), gpu)
    except UserError as error:
        return error


def _of_machine(text: str) -> bool:
    """Return whether the machine of the recording is at fault: one rank splits no tensors, for one."""
    return text.strip() == "AssertionError:" or any(word in text for word in MACHINE)


def _fault(path: Path, case: Mapping[str, Any]) -> dict[str, Any]:
    result = _checked(path, case["args"])
    found = [] if isinstance(result, UserError) else [(f.code, f.path, f.line, f.message) for f in result.findings]
    remarks = [f"expected: {case['expect']} ({case['fault']})", *(f"{n}: {c} {p}: {m}" for c, p, n, m in found)]
    codes = {c for c, *_ in found}
    asked = set(re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)+", case["expect"]))
    errors = [] if isinstance(result, UserError) else result.errors
    met = not errors if case["expect"] == "clean" else bool(codes & asked if asked else codes)
    row: dict[str, Any] = {"file": path.name, "found": met, "codes": sorted(codes), "remarks": remarks}
    if isinstance(result, UserError) or case["expect"] == "clean":
        return row
    spans = list(_spoken_of(result.document, " ".join(case[name] for name in ("expect", "fault", "want"))))
    lines = sorted({line for code, _, line, _ in found if code in asked or not codes & asked})
    at = any(first <= line <= last for first, last in spans for line in lines)
    return row | {"lines expected": spans, "lines found": lines, "at its line": at}


def _spoken_of(document: Document, words: str) -> Iterator[tuple[int, int]]:
    """Yield first and last line of each key that the words speak of; line 1 where they speak of none that is there."""
    spoken = f" {_plain_words(words)} "
    values_named = set(re.findall(r"\b(\d+) !=", words))
    spans = [
        (member.place.line, document.text.count("\n", 0, member.value.place.end) + 1)
        for path, member in _members(document.root, "")
        if _named(member.key, path, spoken) or (not member.value.members and str(member.value.data) in values_named)
    ]
    inner = [one for one in spans if not any(one != other and _inside(other, one) for other in spans)]
    yield from inner or [(1, 1)]


def _named(key: str, path: str, spoken: str) -> bool:
    """Return whether words name a key: its path, all of its name, or all but its first word where it has many."""
    names = {
        _plain_words(path),
        _plain_words(key),
        *([_plain_words(key).partition(" ")[2]] if key.count("_") > 2 else []),
    }
    return any(f" {name} " in spoken for name in names if len(name) > 2)


def _inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _plain_words(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def _members(value: ParsedValue, prefix: str) -> Iterator[tuple[str, ObjectMember]]:
    for member in value.members:
        yield f"{prefix}{member.key}", member
        yield from _members(member.value, f"{prefix}{member.key}.")


def _file(case: Mapping[str, Any], result: CheckResult | UserError) -> dict[str, Any]:
    said = {name: case[name] for name in PROGRAMS if name in case}
    refusals = {n: s for n, s in said.items() if s != "ok" and not _of_machine(s)}
    row: dict[str, Any] = {"file": case["file"], "remarks": [], "refused": bool(refusals), "clean": "ok"}
    row["runs"] = not refusals
    row["warned"] = [] if isinstance(result, UserError) else [f.code for f in result.warnings]
    row["right"] = not isinstance(result, UserError) and not result.findings
    if isinstance(result, UserError):
        row |= {"said": ["syntax"], "false": row["runs"], "fix": "none"}
        if row["runs"]:
            row["remarks"].append(f"refused: {result}")
        return row
    stops = [f for f in result.errors if f.effect == "stops"]
    row |= {"said": sorted({f.code for f in result.errors}), "false": bool(row["runs"] and stops)}
    if row["false"]:
        row["remarks"] += [f"false: {f.line}: {f.message} [{f.code}] {f.why}" for f in stops]
    row["missed"] = row["refused"] and not stops
    if row["missed"]:
        row["remarks"] += [f"missed: {name}: {text[:200]}" for name, text in refusals.items()]
    row["fix"], remark = _fixed(result)
    if row["fix"] not in ("none", "kept"):
        row["remarks"].append(f"fix: {row['fix']}: {remark}")
    return row


def _fixed(result: CheckResult) -> tuple[str, str]:
    """Return what `--fix` did to the meaning: none, kept, changed, lost, refused or unstable, and how."""
    text = result.fixed()
    if text == result.document.text:
        return "none", ""
    again = _recheck(text, result)
    if again.fixed() != text:
        return "unstable", "a second --fix changes it again"
    bag = values(result.document.config)
    before, after = meaning(result.document.config), meaning(parse(text).config)
    stopping = [f.code for f in again.errors if f.effect == "stops"]
    if isinstance(after, str) and not stopping:
        return "refused", after
    if isinstance(before, str):
        lost = bag - values(parse(text).config)
        return ("lost", str(dict(lost))) if lost else ("kept", "")
    if isinstance(after, str):
        return "refused", after
    changed = [path for path in before if before[path] != after.get(path) and _took_effect(path, before, after, bag)]
    return ("changed", ", ".join(f"{p}: {before[p]} -> {after.get(p)}" for p in changed)) if changed else ("kept", "")


def _took_effect(path: str, before: dict[str, Any], after: dict[str, Any], bag: Counter[str]) -> bool:
    """Return whether a value that is another now was in force: not a default whose place the file's own value takes."""
    if path.endswith(".max_grad_norm"):  # DeepSpeed warns of it and clips by gradient_clipping
        return _word(before[path]) != _word(after["gradient_clipping"])
    return before[path] != _defaults().get(path) or _word(after.get(path)) not in bag


@cache
def _defaults() -> dict[str, Any]:
    found = meaning({})
    assert not isinstance(found, str)
    return found


def _recheck(text: str, result: CheckResult) -> CheckResult:
    document = parse(text)
    return replace(result, document=document, findings=tuple(find_all(document, result.hardware)))


def meaning(config: Any) -> dict[str, Any] | str:
    """Return what DeepSpeed's reader makes of a configuration, by attribute, or its error."""
    from deepspeed.runtime.config import DeepSpeedConfig

    config = json.loads(json.dumps(config))
    for path in list(autos(config)):
        drop(config, path)
    if not any(key in config for key in SIZES):
        config[SIZES[1]] = 1
    ranks = _ranks(config)
    try:
        with patch("deepspeed.comm.get_world_size", lambda *_: ranks), patch("deepspeed.comm.get_rank", lambda *_: 0):
            read = DeepSpeedConfig(config)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    found: dict[str, Any] = {}
    for name, value in vars(read).items():
        if name != "_param_dict":
            found |= dict(leaves({name: _plain(value)}))
    return found


def _ranks(config: Mapping[str, Any]) -> int:
    """Return the number of ranks that the batch sizes of a file imply, 1 where they leave it open."""
    given = [config.get(key) for key in (*SIZES, "gradient_accumulation_steps")]
    total, micro, steps = (int(size) if isinstance(size, int) and size > 0 else 0 for size in given)
    each = micro * steps
    return total // each if each and total and total % each == 0 else 1


def _plain(value: Any) -> Any:
    from pydantic import BaseModel

    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return _plain(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else repr(value)


def values(config: Any) -> Counter[str]:
    """Return the values of a file as a bag, numbers and flags in one notation; a move or a new name keeps them."""
    found: Counter[str] = Counter()
    for path, value in leaves({} if not isinstance(config, dict) else config):
        section = path.partition(".")[0]
        if path.rpartition(".")[2].startswith("cpu_offload") or (
            section in catalog().removed and is_off(config[section])
        ):
            continue  # another form of a section, and what is off in a section that is gone
        found[_word(value)] += 1
    return found


def _word(value: Any) -> str:
    word = str(value).strip().lower()
    try:
        return repr(float(word))
    except ValueError:
        return {"true": "1.0", "false": "0.0"}.get(word, word)


def _figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "files": len(rows),
        "refused by a program": sum(row["refused"] for row in rows),
        "of these without an error that stops": sum(bool(row.get("missed")) for row in rows),
        "false errors (files)": sum(row["false"] for row in rows),
        "nothing wrong": sum(row["right"] for row in rows),
        "warnings": sum(len(row["warned"]) for row in rows),
        "fix": dict(Counter(row["fix"] for row in rows)),
    }


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with redirect_stdout(sys.stderr):
        import deepspeed  # noqa: F401  (its log lines before the table)
    main()
