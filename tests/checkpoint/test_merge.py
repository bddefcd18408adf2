"""Adapters merged into their model: what peft computes comes out, whoever wrote them, in groups of any size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers.trainer_utils import align_special_tokens

from tests.data.chats import write_tokenizer
from zerofit.app.checkpoints import Checkpoint
from zerofit.checkpoint.adapters import read_adapters
from zerofit.checkpoint.export import export
from zerofit.checkpoint.merge import merged_weights
from zerofit.checkpoint.store import FrozenWeights, checksum_text
from zerofit.infer.saved_model import find_folder
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.checksums import part_checksum
from zerofit.models.inputs import TextInputs
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter

INPUTS = TextInputs(vocab_size=260, seq_len=16)
SHAPES: dict[str, dict[str, Any]] = {
    "llama-tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0},
}
KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "saved": {"modules_to_save": ["norm", "ln_f"]},
}
TOKENS = torch.arange(16)[None]


@pytest.fixture
def adapters(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A folder of adapters that peft has written, and the model that they are in."""
    name, kind = request.param
    torch.manual_seed(0)
    build(find(name), INPUTS, SHAPES[name]).save_pretrained(tmp_path / "base")  # type: ignore[operator]
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules="all-linear", **KINDS[kind]))
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name or "modules_to_save" in parameter_name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters", model.eval()


every = pytest.mark.parametrize("adapters", [(name, kind) for name in SHAPES for kind in KINDS], indirect=True, ids=str)
one = pytest.mark.parametrize("adapters", [("gpt2", "lora")], indirect=True)


@every
@torch.no_grad()
def test_merged_model_gives_the_logits_of_pefts(adapters, tmp_path):
    folder, model = adapters
    result = export(folder, tmp_path / "merged")
    merged, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(merged(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)
    assert result.parameters == sum(p.numel() for p in merged.parameters())


@one
def test_special_tokens_are_those_of_the_tokenizer(adapters, tmp_path):
    """As after a training by transformers' Trainer, which aligns them itself."""
    folder = adapters[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "tokenizer"))
    tokenizer.save_pretrained(folder)
    export(folder, tmp_path / "merged")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert base.config.eos_token_id == 0 != tokenizer.eos_token_id
    align_special_tokens(base, tokenizer)
    merged = transformers.AutoConfig.from_pretrained(tmp_path / "merged")
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "merged")
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        assert getattr(merged, name) == getattr(base.config, name), name
        assert getattr(generation, name) == getattr(base.generation_config, name), name


@one
def test_groups_of_any_size_give_the_same(adapters):
    part = read_adapters(adapters[0])
    whole, piecewise = (dict(merged_weights(part, most)) for most in (None, 1))
    assert whole.keys() == piecewise.keys()
    assert all(torch.equal(whole[name], piecewise[name]) for name in whole)


@one
def test_other_frozen_weights_are_refused(adapters, tmp_path):
    part = read_adapters(adapters[0])
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    total = sum(part_checksum(name, p) for name, p in base.named_parameters())
    frozen = FrozenWeights(parameters=1, dtype="float32", checksum=checksum_text(total))
    object.__setattr__(part, "frozen", frozen)
    assert list(merged_weights(part))
    with torch.no_grad():
        base.transformer.ln_f.bias[3] += 1e-6
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(UserError, match="differ from the frozen weights"):
        list(merged_weights(part))


@one
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora_bias", True),
        ("target_parameters", ["experts.down_proj"]),
        ("trainable_token_indices", [1]),
        ("layer_replication", [[0, 2], [1, 2]]),
    ],
)
def test_settings_that_are_not_merged_are_refused(adapters, tmp_path, key, value):
    file = adapters[0] / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(UserError, match=f"{key}, which zerofit does not merge"):
        export(adapters[0], tmp_path / "merged")


@torch.no_grad()
def test_peft_loads_the_adapters_of_embeddings_from_a_state_dict(tmp_path):
    torch.manual_seed(0)
    build(find("llama-tiny"), INPUTS, SHAPES["llama-tiny"]).save_pretrained(tmp_path / "base")  # type: ignore[operator]
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "embed_tokens"], use_dora=True)
    model: Any = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    model.peft_config["default"].save_pretrained(tmp_path / "saved")
    (tmp_path / "saved/tokenizer_cache").mkdir()  # no file of the tokenizer
    torch.save(model.state_dict(), tmp_path / "saved/state.pt")
    Checkpoint(tmp_path / "saved").export(tmp_path / "out")
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "out")
    torch.testing.assert_close(loaded.eval()(TOKENS).logits, model.eval()(TOKENS).logits)


@one
def test_a_folder_without_its_model_says_so(adapters, tmp_path):
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="needs a base model that is not here"):
        export(adapters[0], tmp_path / "merged")
    assert find_folder(adapters[0], Reporter()) == adapters[0]


def test_checksums_add_up_over_stretches_and_know_places():
    weight = torch.randn(1000, dtype=torch.bfloat16)
    stretches = [part_checksum("a", weight[:300]), part_checksum("a", weight[300:], start=300)]
    assert checksum_text(sum(stretches)) == checksum_text(part_checksum("a", weight))
    swapped = weight.clone()
    swapped[[3, 4]] = weight[[4, 3]]
    assert part_checksum("a", swapped) != part_checksum("a", weight) != part_checksum("b", weight)
    assert part_checksum("x.q.base_layer.weight", weight) == part_checksum("x.q.weight", weight)
