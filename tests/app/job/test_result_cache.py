"""Results cached from one start to the next are valid while code, versions and the model are the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from zerofit.app.job import model_facts
from zerofit.app.job.model_facts import facts_of, max_positions_of
from zerofit.app.job.result_cache import ROOT, code_digest, result_file
from zerofit.models.catalog import find
from zerofit.models.inputs import TextInputs
from zerofit.spec.errors import UserError
from zerofit.spec.run import Run


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, to be changed."""
    shutil.copytree(ROOT, tmp_path / "zerofit", ignore=lambda folder, names: [n for n in names if n == "__pycache__"])
    code_digest.cache_clear()
    return tmp_path / "zerofit"


@pytest.mark.parametrize(
    "file", ["simulate/costs/profile.py", "models/layers.py", "train/loss.py", "models/data/qwen.json"]
)
def test_any_change_of_the_code_gives_another_digest(copy, file):
    before = code_digest(copy)
    assert before == code_digest(ROOT)
    with (copy / file).open("a") as changed:
        changed.write("\n# changed\n")
    code_digest.cache_clear()
    assert code_digest(copy) != before


def test_a_module_that_moves_gives_another_digest(copy):
    before = code_digest(copy)
    (copy / "simulate" / "ops" / "costs.py").rename(copy / "simulate" / "ops" / "costs_of_ops.py")
    code_digest.cache_clear()
    assert code_digest(copy) != before


def test_versions_count(monkeypatch):
    before = result_file("facts", ["a"])
    assert before == result_file("facts", ["a"]) != result_file("facts", ["b"])
    monkeypatch.setattr("zerofit.app.job.result_cache.versions", lambda: {"torch": "0"})
    assert result_file("facts", ["a"]) != before


@pytest.fixture
def reads(monkeypatch, tmp_path) -> list[str]:
    """Names of the models that were read, with an empty cache."""
    found: list[str] = []
    probe, positions = model_facts.probe, model_facts.source_max_positions
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_facts, "probe", lambda source, *rest: found.append(source.name) or probe(source, *rest))
    monkeypatch.setattr(
        model_facts, "source_max_positions", lambda source, args: found.append(source.name) or positions(source, args)
    )
    return found


def test_a_models_figures_are_read_once(reads):
    run, source, inputs = Run(model="llama-tiny"), find("llama-tiny"), TextInputs(vocab_size=259, seq_len=32)
    first = facts_of(source, "causal-lm", inputs, run)
    assert facts_of(source, "causal-lm", inputs, run) == first
    assert reads == ["llama-tiny"]
    wider = facts_of(source, "causal-lm", inputs, Run(model="llama-tiny", model_args={"hidden_size": 96}))
    longer = facts_of(source, "causal-lm", TextInputs(vocab_size=259, seq_len=64), run)
    assert wider.hidden_size == 96 and longer.forward_flops > 2 * first.forward_flops
    assert max_positions_of(source, {}) == max_positions_of(source, {}) == 1024
    assert reads == ["llama-tiny"] * 4


def test_a_changed_config_is_read_again(reads, tmp_path):
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 77}
    file = tmp_path / "config.json"
    config["architectures"] = ["GPT2LMHeadModel"]
    file.write_text(json.dumps(config))
    source = find(str(file))
    assert [max_positions_of(source, {}) for _ in range(2)] == [77, 77]
    file.write_text(json.dumps({**config, "n_positions": 99}))
    assert max_positions_of(source, {}) == 99
    assert len(reads) == 2


def test_half_a_file_is_written_anew(reads):
    source = find("llama-tiny")
    max_positions_of(source, {})
    (file,) = model_facts.result_file("facts", []).parent.iterdir()
    file.write_text("{")
    assert max_positions_of(source, {}) == 1024
    assert json.loads(file.read_text()) == 1024


def test_what_a_model_refuses_is_refused_each_time(reads):
    source = find("llama-tiny")
    for _ in range(2):
        with pytest.raises(UserError, match="not a key of LlamaConfig"):
            max_positions_of(source, {"hidden_sise": 3})
