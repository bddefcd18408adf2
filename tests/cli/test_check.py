"""`zerofit check` and `zerofit schema` as a user and as a script see them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from zerofit.cli.main import main

BROKEN = '{\n  "train_batch_size": 8,\n  "zero_optimisation": {"stage": 2} // one letter\n}\n'
WARNED = '{"train_batch_size": 8, "vocabulary_size": 1000}\n'


def run(*args: object):
    return CliRunner().invoke(main, ["check", *map(str, args)])


@pytest.fixture
def broken(tmp_path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(BROKEN)
    return path


def test_the_answer_for_scripts(broken):
    done = run(broken, "--json")
    assert done.exit_code == 2
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert answer["file"] == str(broken)
    (problem,) = answer["problems"]
    assert {k: problem[k] for k in ("line", "column", "path", "severity", "code")} == {
        "line": 3,
        "column": 3,
        "path": "zero_optimisation",
        "severity": "error",
        "code": "unknown-key",
    }
    assert "zero_optimization" in problem["fix"] and problem["message"]


@pytest.mark.parametrize(
    ("text", "flags", "code"),
    [("{}", [], 0), (WARNED, [], 0), (WARNED, ["--strict"], 1), (BROKEN, ["--strict"], 2), ('{"a" 1}', [], 2)],
)
def test_exit_codes(tmp_path, text, flags, code):
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert run(path, *flags).exit_code == code
    assert run(path, *flags, "--json").exit_code == code


def test_fix_writes_beside_and_never_over(broken):
    done = run(broken, "--fix")
    assert broken.read_text() == BROKEN
    fixed = broken.with_name("ds.fixed.json")
    assert "// one letter" in fixed.read_text() and '"zero_optimization"' in fixed.read_text()
    assert '-  "zero_optimisation": {"stage": 2} // one letter' in done.stdout
    assert run(fixed).exit_code == 0
    fixed.write_text("mine")
    answer = json.loads(run(broken, "--fix", "--json").stdout.strip().splitlines()[-1])
    assert answer["written"].endswith("ds.fixed-2.json") and fixed.read_text() == "mine"
    assert run("zero2", "--fix", "--json").exit_code == 0  # nothing to change, nothing written


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"fp16": {"fp16": true, "enabled": true}}', {"fp16": {"enabled": True}}),
        ('{"fp16": {"enabled": 1}}', {"fp16": {"enabled": True}}),
        ('{"fp16": {"enabled": "tru"}}', {"fp16": {"enabled": True}}),
        ('{"bf16": true}', {"bf16": {"enabled": True}}),
        ('{"optimizer": {"type": "ZeroOneAdam", "params": {}}}', {"optimizer": {"type": "adam", "params": {}}}),
        ('{"aio": {"thread_count": 2}}', None),
    ],
)
def test_a_fix_keeps_what_was_meant(tmp_path, text, expected):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, ' + text[1:])
    (tmp_path / "ds.fixed.json").mkdir()  # in the way
    answer = json.loads(run(path, "--fix", "--json").stdout.strip().splitlines()[-1])
    fixed = json.loads(Path(answer["written"]).read_text())
    if expected is not None:
        assert fixed == {"train_batch_size": 8, **expected}


def test_sizes_of_a_run_are_checked_too():
    assert run("zero2", "--ranks", 0).exit_code == 2


def test_line_ends_stay_what_they_were(tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(BROKEN.replace("\n", "\r\n").encode())
    run(path, "--fix")
    fixed = path.with_name("ds.fixed.json").read_bytes()
    assert fixed.count(b"\r\n") == fixed.count(b"\n") == BROKEN.count("\n")


def test_a_name_is_a_bundled_file_and_an_unknown_one_offers_the_nearest():
    assert run("zero2_offload").exit_code == 0
    done = run("zero2_ofload", "--json")
    assert done.exit_code == 2
    assert "zero2_offload" in json.loads(done.stdout.strip().splitlines()[-1])["error"]["hint"]


def test_ranks_and_devices_are_counted_in(tmp_path):
    path = tmp_path / "ds.json"
    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    path.write_text(json.dumps(config | {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}))

    def codes(*flags: object) -> set[str]:
        return {p["code"] for p in json.loads(run(path, *flags, "--json").stdout.splitlines()[-1])["problems"]}

    assert codes() == codes("--ranks", 4) == codes("--ranks", 8, "--pipeline", 2) == set()
    assert codes("--ranks", 8) == {"batch-identity"}
    assert codes("--gpu", "v100-32gb") == {"bf16-device"}
    assert codes("--gpu", "h100-80gb") == set()


def test_sizes_against_a_model(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}')
    answer = json.loads(run(path, "--model", "llama-tiny", "--json").stdout.strip().splitlines()[-1])
    assert [p["code"] for p in answer["problems"]] == ["bucket-above-model"]


def test_resolve_gives_plain_json_that_raw_deepspeed_takes(tmp_path):
    from deepspeed.runtime.config import DeepSpeedConfig

    flags = ("--model", "llama-tiny", "--gpu", "h100-80gb", "--precision", "bf16", "--micro-batch", 4, "--ranks", 1)
    done = run("zero3_offload", "--resolve", "--explain", *flags)
    assert done.exit_code == 0, done.output
    plain = json.loads(done.stdout)
    theirs = DeepSpeedConfig(plain)
    assert theirs.bfloat16_config.enabled and theirs.train_batch_size == 4
    assert theirs.zero_config.reduce_bucket_size == plain["zero_optimization"]["reduce_bucket_size"] < 5e8
    answer = json.loads(run("zero3_offload", "--resolve", *flags, "--json").stdout.strip().splitlines()[-1])
    assert answer["resolved"] == plain
    whys = {row["path"]: row["why"] for row in answer["reasons"]}
    assert all(whys.values()), whys
    assert "zero_optimization.reduce_bucket_size" in whys


def test_resolve_says_what_it_needs(tmp_path):
    done = run("zero2", "--resolve", "--json")
    assert done.exit_code == 2 and "--model" in done.stdout
    path = tmp_path / "ds.json"
    path.write_text(BROKEN)
    done = run(path, "--resolve", "--model", "llama-tiny", "--json")
    assert done.exit_code == 2
    assert "unknown-key" in done.stdout


def test_explain_is_a_table_for_people_and_rows_for_scripts(broken):
    done = run(broken, "--explain")
    assert "zero_optimisation.stage" in done.stdout and "ignored" in done.stdout
    rows = json.loads(run(broken, "--explain", "--json").stdout.strip().splitlines()[-1])["explained"]
    assert {k: rows[0][k] for k in ("path", "value")} == {"path": "train_batch_size", "value": 8}


def test_brackets_are_text(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "[/x] [y]": "[bold]"}')
    done = run(path, "--explain")
    assert done.exit_code == 2, done.exception
    assert "[/x] [y]" in done.stdout.split("what it does")[1] and '"[bold]"' in done.stdout


def test_migrate_names_what_is_lost(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(
        '{"train_batch_size": 8, "gradient_clipping": 1.0, "steps_per_print": 5, "nebula": {"enabled": true}}'
    )
    done = run(path, "--migrate")
    assert "nebula" in done.stderr
    assert "nebula" not in (tmp_path / "old.migrated.json").read_text()


def test_the_schema_is_printed():
    done = CliRunner().invoke(main, ["schema"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["properties"]["zero_optimization"]["properties"]["stage"]["enum"] == [0, 1, 2, 3]


def test_a_check_imports_no_torch(broken):
    """It would take seconds. The process says itself what it has imported."""
    code = (
        "import sys\nfrom zerofit.cli.main import main\n"
        f"try: main(['check', {str(broken)!r}, '--explain', '--fix'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_training_checks_the_json_first(broken, tmp_path):
    args = (
        "train",
        "lenet",
        "--data",
        "digits",
        "--ds-config",
        str(broken),
        "--output",
        str(tmp_path / "run"),
        "--json",
    )
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 2
    error = json.loads(done.stdout.strip().splitlines()[-1])["error"]
    assert error["kind"] == "unknown-key" and error["where"].startswith(f"{broken}:3:3")
    assert not (tmp_path / "run").exists()
