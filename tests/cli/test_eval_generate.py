"""`zerofit eval` and `zerofit generate` as a user calls them; the training engine's own evaluation is the reference."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tests.cli.asking import answer
from tests.infer.small import save, save_small
from zerofit.cli.main import main

EVAL = {
    *("loss", "accuracy", "top5_accuracy", "perplexity", "samples", "device_map", "peak_host_bytes"),
    *("peak_device_bytes", "samples_per_s", "tokens_per_s"),
}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def run(pools, tmp_path_factory):
    """A language model's run of two steps."""
    args = {**TINY, "intermediate_size": 48}
    more = {"data": "synthetic", "seq_len": 32, "micro_batch": 4, "steps": 2, "eval_samples": 18, "seed": 5}
    more |= {"lr": 1e-2, "save_every": 2}
    return pools(2).train(tmp_path_factory.mktemp("run") / "run", model="llama-tiny", model_args=args, **more)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders that hold models without a run."""
    path = tmp_path_factory.mktemp("saved")
    save_small(path / "gpt2", "gpt2")
    save_small(path / "bert", "bert")
    save(path / "lenet", "lenet")
    save(path / "bytes", "llama-tiny", {**TINY, "intermediate_size": 48})
    (path / "empty").mkdir()
    return path


def test_the_engines_own_evaluation_of_text(run):
    """From the run's model, and from its checkpoint with weights on the disk."""
    engine = run.result["eval"]
    got = answer("eval", run.folder.path, "--eval-samples", 18)
    assert set(got) >= EVAL
    assert (got["loss"], got["perplexity"]) == pytest.approx((engine["loss"], engine["perplexity"]), rel=1e-6)
    assert (got["samples"], got["step"], got["device_map"]) == (18, 2, {"": "cpu"})
    assert got["top5_accuracy"] is got["peak_device_bytes"] is None
    assert got["peak_host_bytes"] > 100 << 20
    (checkpoint,) = (run.folder.path / "checkpoints").iterdir()
    less = got["placement"][0]["needed_bytes"] - 4096
    spread = answer("eval", checkpoint, "--eval-samples", 18, "--max-memory", f"cpu={less}")
    assert "disk" in spread["device_map"].values()
    assert spread["loss"] == pytest.approx(engine["loss"], rel=1e-6)


def test_the_engines_own_evaluation_of_images(pools, tmp_path):
    options = {"model": "resnet18-small", "data": "digits", "micro_batch": 4, "steps": 2, "eval_samples": 30}
    engine = pools(2).train(tmp_path / "run", **options).result["eval"]
    got = answer("eval", tmp_path / "run", "--eval-samples", 30)
    assert (got["loss"], got["accuracy"]) == pytest.approx((engine["loss"], engine["accuracy"]), rel=1e-5)
    assert got["accuracy"] <= got["top5_accuracy"] <= 1
    assert got["perplexity"] is got["tokens_per_s"] is None


def test_other_data_than_the_trainings(saved):
    first, again = (answer("eval", saved / "lenet", *seed, "--eval-samples", 9) for seed in ((), ("--seed", 3)))
    assert first["samples"] == again["samples"] == 9
    assert first["loss"] != again["loss"]


def test_text_is_streamed(saved):
    args = ["generate", str(saved / "bytes"), "--prompt", "def ", "--max-new-tokens", "12", "--seed", "4"]
    plain = CliRunner().invoke(main, args)
    assert plain.exit_code == 0, plain.output
    got = answer(*args)
    assert set(got) >= {"text", "tokens", "tokens_per_s", "device_map"}
    assert got["tokens"] <= 12
    assert plain.stdout == got["text"] + "\n"
    assert "tokens/s" in plain.stderr
    assert answer(*args)["text"] == got["text"]


def test_it_does_not_fit(saved):
    """A finding, with the knob to turn, before anything is loaded."""
    problem = answer("eval", saved / "gpt2", "--max-memory", "cpu=40MiB", code=1)["error"]
    assert problem["kind"] == "does-not-fit"
    assert "cpu needs" in problem["message"]
    assert "--micro-batch" in problem["hint"]
    problem = answer("generate", saved / "bytes", "--prompt", "a", "--max-memory", "cpu=1KiB", code=1)["error"]
    assert "--max-new-tokens" in problem["hint"]


@pytest.mark.parametrize(
    ("args", "kinds"),
    [
        (("eval", "nowhere"), ["no-model"]),
        (("eval", "empty"), ["no-model"]),
        (("eval", "nowhere", "--max-memory", "3=1GiB,cpu=x", "--data", "digit"), None),
        (("eval", "gpt2", "--data", "synthetic:300"), ["vocabulary"]),
        (("eval", "gpt2", "--seq-len", "33"), ["seq-len"]),
        (("eval", "gpt2", "--data", "digits"), ["data-task"]),
        (("eval", "lenet", "--data", "digits"), ["classes", "channels"]),
        (("eval", "lenet", "--data", "synthetic:9"), ["classes"]),
        (("eval", "lenet", "--micro-batch", "0"), ["bad-value"]),
        (("generate", "bert", "--prompt", "a"), ["cannot-generate"]),
        (("generate", "lenet", "--prompt", "a"), ["cannot-generate"]),
        (("generate", "nowhere", "--prompt", ""), ["empty-prompt", "no-model"]),
        (("generate", "gpt2", "--prompt", "a"), ["vocabulary"]),
        (("generate", "bytes", "--prompt", "a", "--max-new-tokens", "2000"), ["too-long"]),
        (("generate", "bytes", "--prompt", "a", "--tokenizer", "nowhere"), ["tokenizer"]),
        (("generate", "bytes", "--prompt", "a", "--top-p", "0"), ["usage"]),
    ],
)
def test_bad_input_at_once(args, kinds, saved):
    command, folder, *more = args
    got = answer(command, saved / folder, *more, code=2)
    found = [p["kind"] for p in got.get("errors", [got["error"]])]
    assert found == (kinds or ["unknown-data", "unknown-device", "bad-size", "no-model"])


def test_a_model_from_elsewhere_needs_to_be_told_more(tmp_path):
    save_small(tmp_path / "model", "gpt2")
    (tmp_path / "model" / "zerofit.json").unlink()
    got = answer("eval", tmp_path / "model", code=2)
    assert [p["kind"] for p in got["errors"]] == ["data-missing", "tokenizer"]
    got = answer("eval", tmp_path / "model", "--data", "synthetic:100", "--eval-samples", 4)
    assert (got["samples"], got["step"]) == (4, None)
