from __future__ import annotations

import json

import pytest

from zerofit.checkpoint.model_folder import ModelInfo, read_model_info
from zerofit.models.inputs import ImageInputs, TextInputs, inputs_from_dict, inputs_to_dict
from zerofit.spec.errors import UserError

IMAGES = ImageInputs(channels=1, size=8, classes=10)
TEXT = TextInputs(vocab_size=260, seq_len=16, mask_id=257)
ABOUT = ModelInfo(
    model="lenet",
    model_args={"width": 4},
    task="image",
    inputs=IMAGES,
    loss=None,
    data="digits",
    text_field="text",
    tokenizer="bytes",
    seq_len=None,
    image_size=8,
    step=3,
    dtype="float32",
)


def test_what_is_written_is_read(tmp_path):
    ABOUT.write(tmp_path)
    assert read_model_info(tmp_path) == ABOUT
    assert json.loads((tmp_path / "zerofit.json").read_text())["inputs"]["kind"] == "image"


def test_a_folder_without_it_says_nothing(tmp_path):
    assert read_model_info(tmp_path) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"model": "lenet"}', '{"inputs": {"kind": "sound"}}', '{"inputs": 3}'])
def test_another_file_of_that_name_is_refused(tmp_path, text):
    (tmp_path / "zerofit.json").write_text(text)
    with pytest.raises(UserError, match=r"zerofit\.json"):
        read_model_info(tmp_path)


@pytest.mark.parametrize("inputs", [IMAGES, TEXT])
def test_inputs_come_back(inputs):
    assert inputs_from_dict(json.loads(json.dumps(inputs_to_dict(inputs)))) == inputs
