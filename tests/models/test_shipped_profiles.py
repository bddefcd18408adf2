"""Profiles that ship with the package are those that the code makes now."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import shipped_profiles as maker
from zerofit.app.planning import profiles
from zerofit.app.planning.profiles import ProfileRequest, get_profile
from zerofit.models import shipped_profiles as shipped
from zerofit.plan.degrees import Degrees
from zerofit.spec.events import Reporter

LLAMA = ProfileRequest(model="llama-3.1-8b", precision="bf16", device="cuda")


def test_the_code_that_traces_is_the_one_that_made_them():
    made = maker.FINGERPRINT.read_text().strip()
    again = "run benchmarks/shipped_profiles.py --check --sample; where profiles differ, without options"
    assert made == maker.fingerprint(), again


def test_words_are_not_part_of_the_fingerprint():
    import ast

    def plain(text: str) -> str:
        return str(maker._plain(maker._Wordless().visit(ast.parse(text))))

    one = 'def f(x):\n    """Return it."""\n    raise ValueError(f"no such {x}", "key")  # why'
    same = 'def f(x):\n    raise ValueError(f"there is no {x}", "key")'
    assert plain(one) == plain(same)
    assert plain(one) != plain(same.replace('"key"', '"other"')) and plain(one) != plain(same.replace("(x)", "(y)"))


@pytest.mark.parametrize("model", ["lenet", "mlp-table", "bert-base"])
def test_a_shipped_profile_is_what_a_trace_gives(model):
    assert maker.same(model)


def test_every_line_is_read_as_a_profile_of_its_model():
    for file in shipped.FOLDER.glob("*.xz"):
        name, (digest, _) = next(iter(shipped.read_lines(file).items()))
        assert digest == shipped.config_digest(name)
    read = shipped.shipped_profile("llama-3.1-8b", "cuda", "bf16", 1024)
    assert read and read.model == "llama-3.1-8b" and read.parameters == 8_030_261_248


def test_what_it_was_not_made_for_is_traced(monkeypatch, tmp_path):
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path))
    traced = []
    monkeypatch.setattr(profiles, "_trace", lambda wanted, report: traced.append(wanted) or made)
    made, file = get_profile(LLAMA, Reporter())
    assert file and file.is_file() and not traced
    assert not get_profile(replace(LLAMA, degrees=(Degrees(), Degrees(tp=4))), Reporter())[0].zero3 and not traced
    others = [{"seq_len": 333}, {"precision": "fp32"}, {"model_args": {"num_hidden_layers": 2}}, {"task": "classify"}]
    others += [{"degrees": (Degrees(tp=16),)}]
    for other in others:
        get_profile(replace(LLAMA, **other), Reporter())
    assert len(traced) == len(others)
    monkeypatch.setattr(profiles, "installed_version", lambda name: "0.1")  # of another torch
    get_profile(replace(LLAMA, checkpointings=(True, False)), Reporter())
    monkeypatch.setitem(shipped.PRESETS, "llama-3.1-8b", {})
    assert shipped.shipped_profile("llama-3.1-8b", "cuda", "bf16") is None and len(traced) == len(others) + 1
