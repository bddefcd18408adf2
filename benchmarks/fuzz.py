"""Random command lines, run files, model configs and data files: none may end in an error of zerofit itself, or hang.

python benchmarks/fuzz.py [--commands 5000 --runs 2000 --configs 2000 --data 2000] [--seed 0] [--output FILE.json]

Each case is a `zerofit` command in a process of its own, forked from one that has imported everything. It must end
within 60 seconds with exit code 0 (done), 1 (a finding) or 2 (bad input); with 2 where its input is nonsense, without 2
where nothing is wrong. Commands that start ranks always get nonsense, so that none starts. The exit code is 1 when a
case fails.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VALID, REFUSED, EITHER = (0, 1), (2,), (0, 1, 2)
LIMIT_S = 60.0
MEMORY_BYTES = 8 << 30  # of address space beyond what the parent has mapped
JOB = ["--slurm", "job.sh", "--time", "1:00:00", "--output", "out", "--nodes", "1", "--slots", "1", "--device", "cpu"]
RESOLVE = "(resolve)"  # in place of a command: what `zerofit train` does up to the first rank
STARTS = {"train", "tune", "compare", "launch", "eval", "generate", "calibrate", "doctor", "simulate"}
FOR_OTHERS = {"pairs.jsonl", "preferences.jsonl"}  # records of other programs' trainers
WORDS = ["nan", "inf", "-inf", "1e999", "abc", "", "-", "0x10", "١٢", "1,5", "NaN%", "--", "\x1b[31m", "1;2", "[]"]
NUMBERS = ["-1", "-0.5", "9" * 400, "1e400", "-9223372036854775809"]
POOL = [
    "0",
    "1",
    "2",
    "3",
    "8",
    "64",
    "1e-4",
    "0.5",
    "4096",
    "100000",
    "auto",
    "8:2",
    "none",
    "true",
    "a" * 300,
    "é",
    "../nowhere",
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One command and the files in its folder."""

    arguments: list[str]
    files: dict[str, bytes] = field(default_factory=dict)
    allowed: tuple[int, ...] = (0, 1, 2)  # exit codes


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a case ended; `code` is None where it was still running after the limit, negative for a signal."""

    code: int | None
    seconds: float
    printed: str

    def fault(self, case: Case) -> str | None:
        """Return what is wrong with it, if anything is."""
        if self.code is None:
            return "hang"
        if "Traceback (most recent call last)" in self.printed:
            return "traceback"
        return None if self.code in case.allowed else f"exit code {self.code} is not of {case.allowed}"


def commands(rng: random.Random) -> Case:
    """A command with up to six of its options; what would start ranks has a number that is none."""
    path, options, arguments = rng.choice(_interface())
    line = [*path]
    for _ in range(rng.choice([0, 1, 1, 1, 2]) if arguments else 0):
        line.append(
            rng.choice(
                ["gpt2", "lenet", "llama-tiny", "mlp", "nobody", "", ".", "run.yaml", "ds.json", "/nowhere", *POOL]
            )
        )
    for option in rng.sample(options, k=min(len(options), rng.randrange(7))):
        line.append(option.opts[-1])
        if not option.is_flag:
            line.append(rng.choice(_choices(option) + POOL + NUMBERS + WORDS[:4]))
    numeric = [option for option in options if option.type.name in ("integer", "float", "integer range", "float range")]
    is_nonsense = path[0] in STARTS or bool(numeric and rng.random() < 0.5)
    if is_nonsense:
        if not numeric:
            line = [*path, "--no-such-option"]
        else:
            line += [rng.choice(numeric).opts[-1], rng.choice(["nan", "inf", "1e999", "abc", "", "-7.5"])]
    files = {"run.yaml": b"model: lenet\ndata: digits\nsteps: 3\n", "ds.json": b'{"train_batch_size": 8}'}
    return Case(arguments=line, files=files, allowed=REFUSED if is_nonsense else EITHER)


def _interface() -> list[tuple[list[str], list[Any], bool]]:
    """Each command with its options, and whether it takes arguments."""
    import click

    from zerofit.cli.main import main

    found: list[tuple[list[str], list[Any], bool]] = []

    def walk(command: click.Command, path: list[str]) -> None:
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child
                walk(child, [*path, name])
            return
        # eager options (--list) answer before the others are looked at
        options = [one for one in command.params if isinstance(one, click.Option) and not one.is_eager]
        found.append((path, options, any(isinstance(one, click.Argument) for one in command.params)))

    if not _KNOWN:
        walk(main, [])
        _KNOWN.extend(found)
    return _KNOWN


_KNOWN: list[tuple[list[str], list[Any], bool]] = []


def _choices(option: Any) -> list[str]:
    known = {
        "--gpu": ["h100-80gb", "a100-40gb", "cpu"],
        "--data": ["digits", "synthetic", "csv:x.csv"],
        "--gpus": ["8"],
    }
    return [*getattr(option.type, "choices", ()), *known.get(option.opts[-1], ())]


RUN = {
    "model": "lenet",
    "data": "digits",
    "steps": 3,
    "epochs": None,
    "micro_batch": 4,
    "lr": 0.01,
    "seed": 1,
    "ranks": 1,
    "precision": "fp32",
    "compile": False,
    "weight_decay": 0.1,
    "optimizer": "adamw",
    "ds_config": {"zero_optimization": {"stage": 1}},
    "save_every": "0",
    "freeze": ["conv1"],
}
YAML_NONSENSE = {  # of YAML scalars that are no such number
    "steps": [
        "010",
        "yes",
        "1:30",
        "1.5",
        ".inf",
        ".nan",
        "-1",
        "0",
        "[1]",
        "{a: 1}",
        "2026-11-27",
        "!!int abc",
        "'x'",
    ],
    "micro_batch": ["0", "on", "1e3x", "4:20", "-3", "[4]", "null x"],
    "lr": ["1e999", ".inf", ".nan", "-1", "0", "no", "fast", "[0.1]", "2026-01-01"],
    "epochs": [".inf", "-.inf", ".nan", "0", "-2", "off"],
    "seed": ["-1", "1.5", "yes", "9" * 30, "[]"],
    "compile": ["3", "[true]", "maybe"],
    "precision": ["fp64", "16", "true", "[fp16]"],
    "model": ["2026-99-99", "[lenet]", "3", "{a: b}", "os:system", "''"],
    "weight_decay": ["-0.1", ".inf", "true", "x"],
    "ds_config": ["3", "[1]", "{zero_optimization: {stage: 9}}", "nowhere.json", "{a: {b: .nan}}"],
}


def runs(rng: random.Random) -> Case:
    """A run file with a key of nonsense, a key twice, or damage to its text."""
    import yaml

    values = {key: value for key, value in RUN.items() if value is not None and (key == "model" or rng.random() < 0.6)}
    lines = yaml.safe_dump(values, sort_keys=False, default_flow_style=None).splitlines()
    damage = rng.randrange(4)
    if damage == 0:
        key = rng.choice(list(YAML_NONSENSE))
        lines = [line for line in lines if not line.startswith(f"{key}:")]
        lines.insert(rng.randrange(len(lines) + 1), f"{key}: {rng.choice(YAML_NONSENSE[key])}")
    elif damage == 1:
        lines.append(rng.choice(lines))
    text = "\n".join(lines).encode() + b"\n"
    if damage == 3:
        text = _mutated(text, rng)
    allowed = REFUSED if damage < 2 else VALID if damage == 2 else EITHER
    return Case(arguments=["launch", "run.yaml", *JOB], files={"run.yaml": text}, allowed=allowed)


def configs(rng: random.Random) -> Case:
    """A small model's config.json with keys of a wrong kind, gone, or far too large, or with damage to its text."""
    config = dict(rng.choice(_configs()))
    damage = rng.randrange(5)
    allowed = VALID if damage == 4 else EITHER
    sizes = [key for key, value in config.items() if (type(value) is int and "size" in key) or "num_" in key]
    if damage == 0 and sizes:
        config[rng.choice(sizes)] = rng.choice(
            [-1, "a", [], {}, 1.5, True, 10**7, 10**30, float("nan"), float("inf"), None]
        )
    elif damage == 1:
        for key in rng.sample(list(config), k=min(3, len(config))):
            del config[key]
    elif damage == 2:
        config[rng.choice(list(config))] = rng.choice([None, 5, "x", [], {}, [[]], {"a": {}}, -3, 1e300, "\ud800"])
    text = json.dumps(config).encode()
    if damage == 3:
        text = _mutated(text, rng)
    if damage == 0 and rng.random() < 0.2:
        text, allowed = b"[" * rng.choice([200, 100_000]) + text, REFUSED
    layout = ["--gpu", "a100-80gb", "--gpus", "2", "--top", "2", "--micro-batch", "1"]
    return Case(arguments=["plan", "config.json", *layout], files={"config.json": text}, allowed=allowed)


_CONFIGS: list[dict[str, Any]] = []


def _configs() -> list[dict[str, Any]]:
    """Configs of small models as transformers writes them."""
    if not _CONFIGS:
        from transformers import AutoConfig

        text: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        text |= {"num_attention_heads": 2, "max_position_embeddings": 64}
        image: dict[str, Any] = {
            "image_size": 32,
            "depths": [1, 1],
            "embed_dim": 16,
            "num_heads": [1, 2],
            "window_size": 4,
        }
        small = {
            "llama": text | {"num_key_value_heads": 2},
            "qwen3": text | {"num_key_value_heads": 2, "head_dim": 16},
            "mixtral": text | {"num_key_value_heads": 2, "num_local_experts": 2},
            "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128, "n_positions": 64},
            "bert": text,
            "t5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 128},
            "mamba2": {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "num_hidden_layers": 2, "state_size": 16}
            | {"vocab_size": 128, "n_groups": 1},
            "vit": text | {"image_size": 32, "patch_size": 8},
            "swin": image | {"patch_size": 2},
            "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32},
        }
        for name, values in small.items():
            _CONFIGS.append(json.loads(AutoConfig.for_model(name, **values).to_json_string()))
    return _CONFIGS


def data(rng: random.Random) -> Case:
    """A data file with damage to its bytes or records, read as what its name says."""
    name, content, arguments, others = rng.choice(_data())
    damage = rng.randrange(5)
    if damage == 0:
        content = _mutated(content, rng)
    elif damage == 1:
        content = content[: rng.randrange(len(content) + 1)]
    elif damage == 2:
        content = (
            rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\x1f\x8b", b"PK\x03\x04", b"PAR1", b"\x93NUMPY\x01\x00"])
            + content
        )
    elif damage == 3 and name.endswith("jsonl"):
        content = b"\n".join(_wrong_record(line, rng) for line in content.splitlines())
    return Case(
        arguments=arguments,
        files=others | {name: content},
        allowed=VALID if damage == 4 and name not in FOR_OTHERS else EITHER,
    )


def _wrong_record(line: bytes, rng: random.Random) -> bytes:
    """Put a value of a wrong kind somewhere into a record."""
    record = json.loads(line)
    place, key = record, rng.choice(list(record))
    while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.7:
        place = place[key]
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
    place[key] = rng.choice([None, 5, -1.5, True, "x", [], {}, [[]], [{}], {"a": 1}, "\x1b[2J", 10**40])
    return json.dumps(record).encode()


def _data() -> list[tuple[str, bytes, list[str], dict[str, bytes]]]:
    """Valid files, each with the command that reads it and the files beside it."""
    if _FILES:
        return _FILES
    import numpy as np

    texts = [{"text": f"number {n} is followed by number {n + 1}"} for n in range(40)]
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2", "weight": 1}]
    tools = [
        chat[0],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    shown = ["--seq-len", "256", "--show", "1"]

    def lines(records: list[Any]) -> bytes:
        return "".join(f"{json.dumps(record)}\n" for record in records).encode()

    def job(model: str, data_name: str, *flags: str) -> list[str]:
        return [RESOLVE, model, "--data", data_name, *flags, "--ranks", "1"]

    for name, records in {
        "texts.jsonl": texts,
        "chats.jsonl": [{"messages": chat}] * 20,
        "tools.jsonl": [{"messages": [*tools, chat[1]], "tools": []}] * 20,
        "sharegpt.jsonl": [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}] * 20,
        "pairs.jsonl": [{"prompt": "a", "completion": "b"}] * 20,
        "preferences.jsonl": [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 20,
    }.items():
        _FILES.append((name, lines(records), ["data", f"jsonl:{name}", *shown], {}))
    _FILES.append(("texts.jsonl.gz", gzip.compress(lines(texts)), ["data", "jsonl:texts.jsonl.gz", *shown], {}))
    _FILES.append(("array.json", json.dumps(texts, indent=1).encode(), ["data", "jsonl:array.json", *shown], {}))
    _FILES.append(
        ("plain.txt", b"to be or not to be, that is the question\n" * 90, ["data", "text:plain.txt", *shown], {})
    )
    table = "a,b,target\n" + "".join(f"{n},{n * 2},{n % 3}\n" for n in range(60))
    _FILES.append(("table.csv", table.encode(), job("mlp-table", "csv:table.csv:target"), {}))
    array = io.BytesIO()
    np.save(array, np.arange(240, dtype=np.float32).reshape(60, 4) % 3)
    _FILES.append(("table.npy", array.getvalue(), job("mlp-table", "npy:table.npy"), {}))
    grey = _image("L", "PNG")
    others = {f"images/{label}/{n}.png": grey for label in ("cat", "dog") for n in range(8)}
    for form, mode in (("PNG", "RGB"), ("PNG", "I;16"), ("JPEG", "L"), ("GIF", "P")):
        name = f"images/cat/{mode.replace(';', '-')}.{form.lower()}"
        _FILES.append((name, _image(mode, form), job("mlp", "imagefolder:images", "--image-size", "28"), others))
    return _FILES


def _image(mode: str, form: str) -> bytes:
    from PIL import Image

    written = io.BytesIO()
    Image.new(mode, (28, 28), 3).save(written, form)
    return written.getvalue()


_FILES: list[tuple[str, bytes, list[str], dict[str, bytes]]] = []


def _mutated(content: bytes, rng: random.Random) -> bytes:
    """Change, remove, repeat or insert a few stretches of bytes."""
    changed = bytearray(content)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(changed) + 1)
        end = min(len(changed), at + rng.randrange(12))
        piece = rng.choice(
            [b"", b"\x00", b"\xff", b"\x1b]0;x\x07", b"9" * 400, b"[" * 300, b'"', b"{", b"\n", b": ", b"-1", b"&a"]
        )
        changed[at:end] = rng.choice([piece, bytes(changed[at:end]) * 2, bytes(rng.randbytes(4))])
    return bytes(changed)


def run(case: Case, folder: Path) -> Outcome:
    """Run a case in a forked process whose current folder is `folder`."""
    for name, content in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    started = time.monotonic()
    child = os.fork()
    if not child:
        _be_the_command(case.arguments, folder)
    code = _wait(child, started + LIMIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if code is None:
        os.waitpid(child, 0)
    printed = (folder / ".printed").read_text(errors="replace")
    return Outcome(code=code, seconds=time.monotonic() - started, printed=printed)


def _wait(child: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def _be_the_command(arguments: list[str], folder: Path) -> None:
    from zerofit.cli.main import main

    os.setsid()
    os.chdir(folder)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, mapped + MEMORY_BYTES))
    printed = os.open(".printed", os.O_WRONLY | os.O_CREAT, 0o600)
    for descriptor in (1, 2):
        os.dup2(printed, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code: Any = 71
    try:
        if arguments[0] == RESOLVE:
            _resolve(arguments[1:])
            code = 0
        else:
            main(arguments, prog_name="zerofit")
    except SystemExit as end:
        code = end.code
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _resolve(arguments: list[str]) -> None:
    """Resolve a run, with `train`'s options and answers to errors."""
    from zerofit.app.job.requests import read_request
    from zerofit.app.job.resolve import resolve_job
    from zerofit.cli.answer import answer, fail_internally
    from zerofit.cli.options import given
    from zerofit.cli.train import train
    from zerofit.spec.run import Run

    options = train.make_context("train", arguments).params
    flags = given({name: options[name] for name in Run.model_fields if name != "model"})

    def work() -> dict[str, Any]:
        resolve_job(read_request(options["target"], flags))
        return {}

    try:
        answer(work, False, lambda _: None)
    except Exception as error:
        fail_internally(error, False)


KINDS: dict[str, Callable[[random.Random], Case]] = {
    "commands": commands,
    "runs": runs,
    "configs": configs,
    "data": data,
}


def warm() -> None:
    """Import what the commands import, and keep what they cache in a folder of this process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import zerofit.app.clusters.job_files
    import zerofit.app.data_view
    import zerofit.app.planning.planner  # noqa: F401

    _interface()
    _configs()
    _data()


def outcomes(kind: str, count: int, seed: int, scratch: Path) -> Iterator[tuple[int, Case, Outcome]]:
    """Run cases of a kind; case n of a seed is always the same."""
    for number in range(count):
        case = KINDS[kind](random.Random(f"{kind} {seed} {number}"))
        folder = scratch / f"{kind}-{number}"
        folder.mkdir()
        yield number, case, run(case, folder)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind, count in {"commands": 5000, "runs": 2000, "configs": 2000, "data": 2000}.items():
        parser.add_argument(f"--{kind}", type=int, default=count, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write counts and faults as JSON")
    options = parser.parse_args()
    result: dict[str, Any] = {"date": datetime.date.today().isoformat(), "seed": options.seed}
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["ZEROFIT_CACHE"] = f"{scratch}/cache"
        warm()
        for kind in KINDS:
            codes: Counter[str] = Counter()
            faults: list[dict[str, Any]] = []
            longest = 0.0
            for number, case, outcome in outcomes(kind, getattr(options, kind), options.seed, Path(scratch)):
                codes[str(outcome.code)] += 1
                longest = max(longest, outcome.seconds)
                if fault := outcome.fault(case):
                    files = {name: repr(content[:200]) for name, content in case.files.items()}
                    faults.append({"case": number, "fault": fault, "arguments": case.arguments, "files": files})
                    print(f"\n{kind} {number}: {fault}: {case.arguments}\n{outcome.printed[-1500:]}", flush=True)
                if sys.stderr.isatty() or number % 100 == 99:
                    print(f"{kind}: {number + 1} of {getattr(options, kind)}, {len(faults)} faults", file=sys.stderr)
            result[kind] = {
                "cases": sum(codes.values()),
                "exit_codes": codes,
                "longest_s": round(longest, 1),
                "faults": faults,
            }
            failed |= bool(faults)
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
