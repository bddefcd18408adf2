from __future__ import annotations

import pytest

from zerofit.data.opening import IMAGE_SOURCES, KINDS, TABLE_SOURCES, TEXT_SOURCES, check_data, default_data, split_name
from zerofit.spec.errors import UserError


def problem(action, *args):
    with pytest.raises(UserError) as caught:
        action(*args)
    (only,) = caught.value.problems
    return only


def test_names_and_arguments():
    assert split_name("digits") == ("digits", "")
    assert split_name("hf:wikitext:wikitext-2") == ("hf", "wikitext:wikitext-2")


def test_an_unknown_name_offers_near_ones():
    found = problem(split_name, "cifar-10")
    assert found.kind == "unknown-data" and found.hint == "did you mean cifar10?" and found.where == "--data"


def test_a_bare_path_is_read_for_the_user(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    assert problem(split_name, f"{tmp_path}/a.jsonl").hint == f"did you mean jsonl:{tmp_path}/a.jsonl?"
    assert problem(split_name, str(tmp_path)).hint == f"did you mean hf:{tmp_path}?"
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "0.png").touch()
    assert "imagefolder:" in problem(split_name, str(tmp_path)).hint
    for missing in (f"{tmp_path}/c", "c.jsonl"):
        assert problem(split_name, missing).message == f"--data {missing}: no such file or folder"


def test_archives_are_not_taken_for_text(tmp_path):
    (tmp_path / "0.tar").touch()
    for name in (str(tmp_path), f"{tmp_path}/0.tar", f"{tmp_path}/{{0..9}}.tar"):
        assert "extract" in problem(split_name, name).hint
    (tmp_path / "0.png").touch()  # a folder of images, with the archive that they came in
    assert (
        "imagefolder:" in problem(split_name, str(tmp_path)).hint and "mean" in problem(split_name, str(tmp_path)).hint
    )


@pytest.mark.parametrize("name", ["text", "text:", "digits:5", "imagefolder"])
def test_arguments_that_lack_or_are_too_much(name):
    assert problem(split_name, name).kind == "data-argument"


def test_images_do_not_feed_a_language_model():
    assert problem(check_data, "digits", "causal-lm").kind == "data-task"
    assert problem(check_data, "pysource", "gan").kind == "data-task"


def test_defaults_fit_their_tasks():
    for task in ("image", "segmentation", "table", "gan", "causal-lm", "masked-lm"):
        check_data(default_data(task), task)


def test_every_kind_has_a_source():
    assert {k for k, v in KINDS.items() if {"image", "masks"} & v.media} == set(IMAGE_SOURCES)
    assert {k for k, v in KINDS.items() if "table" in v.media} == set(TABLE_SOURCES)
    assert {k for k, v in KINDS.items() if "text" in v.media} == {*TEXT_SOURCES, "synthetic"}
