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
    [("{}", [], 2), (WARNED, [], 0), (WARNED, ["--strict"], 1), (BROKEN, ["--strict"], 2), ('{"a" 1}', [], 2)],
)
def test_exit_codes(tmp_path, text, flags, code):
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert run(path, *flags).exit_code == code
    assert run(path, *flags, "--json").exit_code == code


@pytest.mark.parametrize(
    ("config", "steps", "problem"),
    [("pipeline", 3, "dualpipev-accumulation"), ("zero0", 4, "dualpipev-stage"), ("pipeline", 4, None)],
)
def test_a_schedule_asks_for_its_accumulation_and_stage(config, steps, problem):
    flags = ("--pipeline", 2, "--pipeline-schedule", "dualpipev", "--gradient-accumulation-steps", steps)
    done = run(config, *flags, "--json")
    found = json.loads(done.stdout.strip().splitlines()[-1])["problems"]
    assert [one["code"] for one in found] == ([problem] if problem else [])
    assert done.exit_code == (2 if problem else 0)


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
        ('{"fp16": {"enabled": 1}}', {"fp16": {"enabled": True}}),
        ('{"fp16": {"enabled": "tru"}}', {"fp16": {"enabled": True}}),
        ('{"bf16": true}', {"bf16": {"enabled": True}}),
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

    assert codes("--ranks", 4) == codes("--ranks", 8, "--pipeline", 2) == set()
    assert codes() == codes("--gpu", "h100-80gb") == {"batch-ranks"}
    assert codes("--ranks", 8) == {"batch-identity"}
    assert codes("--gpu", "v100-32gb", "--ranks", 4) == {"bf16-device"}


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
    assert '[/x] [y] = "[bold]"' in done.stdout


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


def test_several_files_and_folders_in_one_go(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "ds.json").write_text(BROKEN)
    (tmp_path / "in" / "other.json").write_text('{"name": "no DeepSpeed in it"}')
    (tmp_path / "in" / "cut.json").write_text('{"train_batch_size": ')
    answer = json.loads(run(tmp_path / "in", "zero2", "--json").stdout.strip().splitlines()[-1])
    by_name = {Path(one["file"]).name: one for one in answer["files"]}
    assert set(by_name) == {"ds.json", "cut.json", "zero2.json"}
    assert by_name["cut.json"]["error"]["kind"] == "json-syntax"
    assert [p["code"] for p in by_name["ds.json"]["problems"]] == ["unknown-key"]
    done = run(tmp_path / "in")
    assert done.exit_code == 2 and "2 files, 2 with errors; checked against DeepSpeed" in done.stderr
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty").exit_code == 2


def test_formats_for_workflows(broken):
    github = run(broken, "--format", "github").stdout
    assert github.startswith(f"::error file={broken},line=3,col=3,title=zerofit unknown-key::")
    (sarif,) = json.loads(run(broken, "--format", "sarif").stdout)["runs"]
    (result,) = sarif["results"]
    assert result["ruleId"] == "unknown-key" and result["level"] == "error"
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 3, "startColumn": 3}


def test_what_stops_a_run_comes_first_and_a_screen_is_enough(tmp_path):
    path = tmp_path / "ds.json"
    unknown = {f"of_mine_{n}": n for n in range(140)}
    slow = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}}
    path.write_text(json.dumps(unknown | {"train_batch_size": 8, "bf16": {"enabled": 3}} | slow, indent=1))
    done = run(path)
    lines = done.stdout.strip().splitlines()
    assert "141 errors" in " ".join(done.stderr.split())
    assert lines[0] == "stops the run" and "wrong-type" in " ".join(lines[1:3]) and len(lines) < 30
    assert lines[lines.index("has a different effect than you expect") + 1].startswith(f"{path}:2:2:")
    assert "[offload-pageable]" in " ".join(lines[lines.index("costs time or memory") :][:4])
    assert "of_mine_39" not in "".join(lines) and "of_mine_39" in run(path, "--all").stdout


def test_a_fix_says_what_is_left_to_decide(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": "8", "fp16": {"enabled": true, "opt_level": "O2"}}')
    done = run(path, "--fix")
    assert "for you to decide" in done.stderr and "opt_level" in done.stderr
    fixed = tmp_path / "ds.fixed.json"
    assert json.loads(fixed.read_text()) == {"train_batch_size": 8, "fp16": {"enabled": True, "opt_level": "O2"}}
    assert json.loads(run(fixed, "--fix", "--json").stdout)["written"] is None
    path.write_text('{"train_batch_size": "8"}')
    assert "the new file has no errors" in run(path, "--fix").stderr


@pytest.mark.parametrize(
    ("raw", "code", "says"),
    [
        (b'{"train_batch_size": 1e400}', 2, "too large for a JSON number"),
        (b'{"train_batch_size": ' + b"9" * 5000 + b"}", 2, "5,000 characters"),
        (b'{"train_batch_size": True}', 2, "Python's True"),
        (b"train_batch_size: 8\n", 0, "YAML"),  # and HJSON as well
        (b"train_batch_size: 8\nfp16:\n  enabled: true\n", 2, "YAML"),
        (b"base_model: mine\n", 2, "--training-args"),
        (b"{" + b'"key": 1, ' * 30_000 + b'"train_batch_size": 8}', 2, "duplicate key"),
        (b"{" + b"".join(b'"k%d": 1, ' % n for n in range(30_000)) + b'"fp16": 1}', 2, "at 29990 more places"),
        (b" " * (64 * 2**20) + b"{}", 2, "bytes"),
        ('{"train_batch_size": 8}'.encode("utf-16"), 2, "utf-16"),
        ('{"train_batch_size": 8}'.encode("utf-16-le"), 2, "utf-16"),
        ('{"train_batch_size": 8}'.encode("utf-8-sig"), 0, "byte order mark"),
        (b"{\n  train_batch_size: 8\n}", 0, "HJSON"),
    ],
)
def test_whatever_the_file_holds(tmp_path, raw, code, says):
    path = tmp_path / "ds.json"
    path.write_bytes(raw)
    done = run(path)
    assert (done.exit_code, says in done.output) == (code, True), done.output


def test_standard_input_is_a_file():
    done = CliRunner().invoke(main, ["check", "-"], input=BROKEN)
    assert done.exit_code == 2 and "-:3:3" in done.stdout
    done = CliRunner().invoke(main, ["check", "-", "--fix"], input=BROKEN)
    assert done.exit_code == 2 and "name a file" in done.stderr


def test_resolve_prints_nothing_but_json_beside_warnings(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 1, "vocabulary_size": 1000}')
    done = run(path, "--resolve", "--model", "llama-tiny", "--gpu", "cpu", "--ranks", 1)
    assert json.loads(done.stdout)["train_micro_batch_size_per_gpu"] == 1
    assert "never-read" in done.stderr
