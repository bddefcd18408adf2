"""Bad input: exit code 2, every problem at once, which knob to turn, no traceback."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from zerofit.cli.answer import fail_internally
from zerofit.cli.main import main
from zerofit.spec.errors import UserError
from zerofit.spec.run import Run


def problems_of(*args: str) -> list[dict]:
    done = CliRunner().invoke(main, ["train", *args, "--json"])
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert answer["error"]["message"] in done.stderr
    return answer.get("errors", [answer["error"]])


@pytest.mark.parametrize(
    ("args", "kind", "word"),
    [
        (("lenett",), "unknown-model", "lenet"),
        (("lenet", "--data", "digit"), "unknown-data", "digits"),
        (("lenet", "--data", "digits", "--ds-config", "zero22"), "unknown-ds-config", "zero2"),
        (("lenet", "--data", "digits", "--global-batch", "7", "--ranks", "2"), "batch-size", "6 or 8"),
        (("lenet", "--data", "digits", "--ranks", "2000"), "ranks", "2000"),
        (("llama-tiny", "--data", "synthetic", "--seq-len", "4096"), "model-shape", "--seq-len"),
        (("llama-tiny", "--data", "text:/nowhere/*.txt"), "", "/nowhere"),
        (("lenet", "--data", "imagefolder:/nowhere"), "", "/nowhere"),
        (("lenet", "--data", "digits", "--steps", "5", "--epochs", "1"), "conflict", "use one"),
        (("vgg16", "--data", "digits"), "model-shape", "--image-size"),
        (("llama-tiny", "--data", "digits"), "", "digits"),
        (("lenet", "--data", "pysource"), "", "pysource"),
        (("lenet", "--data", "digits", "--model-args", '{"widht": 3}'), "model-args", "widht"),
        (("no_such_module:make", "--data", "digits"), "", "no_such_module"),
        (("gpt2", "--data", "synthetic", "--model-args", '{"n_layerz": 1}'), "model-args", "n_layer"),
        (("vit-b-16-hf", "--data", "digits", "--model-args", '{"patch_size": 0}'), "model-args", "patch_size"),
        (("lenet", "--data", "digits", "--seed", "99999999999999"), "bad-value", "--seed"),
        (("lenet", "--data", "digits", "--global-batch", "4294967294", "--micro-batch", "4"), "batch-size", "divides"),
        (("lenet", "--data", "digits", "--epochs", "1e308"), "steps", "4,294,967,295 steps"),
        (("lenet", "--data", "digits", "--steps", "4294967296"), "bad-value", "4,294,967,295"),
    ],
)
def test_each_fault_names_its_knob(args, kind, word, tmp_path):
    (problem,) = problems_of(*args, "--output", str(tmp_path / "run"))
    assert kind in problem["kind"]
    assert word in problem["message"] + problem["hint"]
    assert not (tmp_path / "run").exists()


def test_all_faults_at_once(tmp_path):
    args = ("lenett", "--data", "digit", "--ds-config", "zero22", "--steps", "1", "--epochs", "1")
    kinds = {p["kind"] for p in problems_of(*args)}
    assert kinds == {"unknown-model", "unknown-data", "unknown-ds-config", "conflict"}


def test_a_folder_that_holds_another_run_is_left_alone(tmp_path):
    run = tmp_path / "run.json"
    run.write_text("{}")
    (problem,) = problems_of("lenet", "--data", "digits", "--output", str(tmp_path))
    assert problem["kind"] == "output-exists"
    assert "another run" in problem["message"]
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_json_of_deepspeed_with_a_fault(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n  "bf16": {"enabled" true}\n}')
    (problem,) = problems_of("lenet", "--data", "digits", "--ds-config", str(path))
    assert problem["where"] == f"{path}:2:22"


def test_a_broken_image_is_named(tmp_path):
    from PIL import Image

    for label in ("cat", "dog"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for n in range(8):
            Image.new("RGB", (16, 16), (n * 9, 0, 0)).save(tmp_path / "data" / label / f"{n}.png")
    broken = tmp_path / "data" / "cat" / "3.png"
    broken.write_bytes(broken.read_bytes()[:45])
    (problem,) = problems_of("lenet", "--data", f"imagefolder:{tmp_path / 'data'}", "--image-size", "28")
    assert problem["kind"] == "bad-image"
    assert "3.png" in problem["message"] + problem["where"]
    assert "--skip-bad" in problem["hint"]


def test_an_unknown_flag_is_a_usage_error():
    done = CliRunner().invoke(main, ["train", "lenet", "--micro-bach", "3"])
    assert done.exit_code == 2
    assert "--micro-batch" in done.output


def test_usage_errors_are_json_too():
    done = CliRunner().invoke(main, ["train", "lenet", "--steps", "many", "--json"])
    assert done.exit_code == 2
    error = json.loads(done.stdout.strip().splitlines()[-1])["error"]
    assert error["kind"] == "usage"
    assert "'many'" in error["message"]


@pytest.mark.parametrize(("args", "place"), [(("train", ""), "train"), (("plan", "gpt2", "--gpu="), "--gpu")])
def test_an_unset_variable_of_the_shell_is_not_the_default(args, place):
    done = CliRunner().invoke(main, [*args, "--json"])
    assert done.exit_code == 2
    assert f"the value after {place!r} is empty" in json.loads(done.stdout)["error"]["message"]


@pytest.mark.parametrize(("line", "shown"), [("zerofit trian --st", ""), ('zerofit train "" --stre', "plain,--stream")])
def test_a_line_with_a_mistake_is_completed_without_a_message(monkeypatch, capsys, line, shown):
    words = {"_ZEROFIT_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main.main([], prog_name="zerofit")
    said = capsys.readouterr()
    assert (said.out.strip(), said.err) == (shown, "")


def test_an_option_of_the_script_is_none_of_zerofit():
    """--json after the dashes is the script's, so standard output stays empty."""
    done = CliRunner().invoke(main, ["simulate", "--stepz", "5", "--", "python", "train.py", "--json"])
    assert done.exit_code == 2
    assert "--stepz" in done.stderr and not done.stdout


def test_a_module_of_the_users_that_does_not_parse(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_broken.py").write_text("def make(:\n")
    (problem,) = problems_of("own_broken:make", "--data", "digits")
    assert "own_broken.py, line 1" in problem["message"]


def test_a_run_folder_is_no_model_but_nearly(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    (problem,) = problems_of(str(tmp_path), "--data", "digits", "--output", str(tmp_path / "new"))
    assert "/model" in problem["hint"]


def test_a_key_that_is_no_word(tmp_path):
    (tmp_path / "run.yaml").write_text("1: 2\nmodel: lenet\n")
    (problem,) = problems_of(str(tmp_path / "run.yaml"), "--data", "digits")
    assert problem["message"] == "unknown key 1"
    assert problem["where"].endswith("run.yaml:1")


def test_one_class_is_nothing_to_learn(tmp_path):
    from PIL import Image

    (tmp_path / "data" / "only").mkdir(parents=True)
    for n in range(8):
        Image.new("L", (28, 28), n).save(tmp_path / "data" / "only" / f"{n}.png")
    kinds = {
        p["kind"] for p in problems_of("lenet", "--data", f"imagefolder:{tmp_path / 'data'}", "--image-size", "28")
    }
    assert kinds == {"data-classes"}


def test_help_lists_every_field_of_the_run():
    from zerofit.spec.run import Run

    text = CliRunner().invoke(main, ["train", "--help"]).output
    for field in set(Run.model_fields) - {"model"}:
        assert "--" + field.replace("_", "-") in text


def test_the_default_job_is_the_readmes():
    from zerofit.cli.train import DEFAULT_JOB

    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"zerofit train {DEFAULT_JOB['model']} --data {DEFAULT_JOB['data']} --steps {DEFAULT_JOB['steps']}" in readme


@pytest.mark.parametrize("path", ["a" * 256, "loop", "file/x", "b/" * 2100])
@pytest.mark.parametrize(
    "words",
    [
        ("train", "lenet", "--data", "digits", "--ranks", "1", "--steps", "1", "--output"),
        ("check",),
        ("check", "zero2", "--training-args"),
        ("plan", "--gpu", "h100-80gb", "--profile"),
        ("ckpt", "verify"),
        ("eval",),
        ("plot",),
        ("compare", "strategies", "lenet", "--data", "digits", "--output"),
    ],
)
def test_a_path_that_the_system_refuses_is_bad_input(tmp_path, monkeypatch, words, path):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("loop").symlink_to("loop")
    done = CliRunner().invoke(main, [*words, path])
    assert done.exit_code == 2, done.output
    assert path.split("/")[0] in done.output or "--" in words[-1]


def test_an_error_of_zerofit_itself_is_told_from_one_of_a_path(capsys):
    with pytest.raises(SystemExit) as ended:
        fail_internally(PermissionError(errno.EACCES, "Permission denied", "/root/run"), as_json=False)
    assert ended.value.code == 2 and "/root/run: Permission denied" in capsys.readouterr().err
    for error in (FileNotFoundError(errno.ENOENT, "No such file", "x"), OSError("without a path"), ValueError("x")):
        with pytest.raises(SystemExit) as ended:
            fail_internally(error, as_json=False)
        assert ended.value.code == 70


def commands(command: click.Command, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below
            yield from commands(below, *names, name)
    else:
        yield names, command


def test_no_number_of_any_command_may_be_nan_or_infinite():
    looked = 0
    for names, command in commands(main):
        context = click.Context(command, info_name=" ".join(names))
        for option in command.params:
            if not isinstance(option.type, click.types.FloatParamType):
                continue
            for value in ("nan", "inf", "-inf", "1e999"):
                looked += 1
                try:
                    number = option.type.convert(value, option, context)
                except click.UsageError:
                    continue
                # those of Run and of plan's work are looked at there; the rest by its own command
                assert option.name in Run.model_fields or option.name == "epochs" or option.name == "straggle", names
                assert not math.isfinite(number)
                if option.name in Run.model_fields:
                    with pytest.raises(UserError, match="finite"):
                        Run(**{option.name: number})
    assert looked > 100


LAZY = "from torch import nn\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))\n"


@pytest.mark.parametrize("command", [("plan", "--gpus", "2"), ("simulate", "--gpus", "2"), ("train", "--seq-len", "8")])
@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"num_hidden_layers": 10_000_000}, "at most 2,000"),
        ({"vocab_size": "a"}, "expected int, got str"),
        ({"architectures": 5}, "architectures is 5"),
        ({"num_attention_heads": 0}, "by zero"),
    ],
)
def test_a_config_of_no_use_ends_no_command_otherwise(tmp_path, command, values, word):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2} | values))
    done = CliRunner().invoke(main, [command[0], str(config), *command[1:]])
    assert (done.exit_code, word in done.stderr) == (2, True), done.output


def test_a_layer_without_a_size_is_named(tmp_path, monkeypatch):
    (tmp_path / "lazy_model.py").write_text(LAZY)
    monkeypatch.chdir(tmp_path)
    for command in ("plan", "simulate"):
        done = CliRunner().invoke(main, [command, "lazy_model:make", "--gpus", "2"])
        assert (done.exit_code, "1.weight" in done.stderr) == (2, True), done.output
