"""Configs of transformers as files have them: read as transformers reads them, or refused with the whole reason."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Mamba2Config

from tests.models.small import count_parameters
from zerofit.models.build import build, check_forward
from zerofit.models.catalog import ModelError, find, source_config, source_of
from zerofit.models.hf_config import make_config, notes_of_config, traced_args
from zerofit.models.inputs import TextInputs
from zerofit.spec.model_facts import width
from zerofit.spec.run import Run

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, **SMALL}
KERNEL = "kernels-community/flash-attn3"


def written(folder: Path, **values: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | values))
    return str(path)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*address: Any, **_: Any) -> None:
        raise AssertionError(f"looks for {address} on the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_an_infinite_float_is_read_as_transformers_reads_it(tmp_path):
    Mamba2Config(num_hidden_layers=2, architectures=["Mamba2ForCausalLM"]).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    config = make_config(find(str(tmp_path)), None, {})
    assert config.time_step_limit == AutoConfig.from_pretrained(tmp_path).time_step_limit
    assert config.time_step_limit[1] == float("inf")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"vocab_size": "a"}, "'vocab_size' expected int, got str"),
        ({"num_hidden_layers": 2.5}, "'num_hidden_layers' expected int, got float"),
        ({"hidden_size": float("nan")}, "'hidden_size' expected int, got float"),
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers is 10,000,000; allowed: at most 2,000"),
        ({"n_routed_experts": 10**30}, "n_routed_experts is 1,000,000,0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"intermediate_size": 0}, r"gate_proj.weight is empty, its shape is \(0, 32\)"),
        ({"hidden_size": -32}, "negative dimension"),
        ({"num_attention_heads": 0}, "by zero"),
        ({"output_hidden_states": 2.5}, "'float' object is not iterable"),
        ({"architectures": 5}, "architectures is 5"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ({"model_type": ["llama"]}, "model_type is"),
        ({"id2label": {"a": "b"}}, "id2label"),
        ({"quantization_config": 8}, "quantization_config is 8"),
    ],
)
def test_values_of_no_use_are_refused_with_the_reason(tmp_path, values, reason):
    inputs = TextInputs(vocab_size=64, seq_len=8)
    with pytest.raises(ModelError, match=reason) as caught:
        source = find(written(tmp_path, **values))
        with torch.device("meta"):
            model = build(source, inputs, {})
        check_forward(model, source, inputs)
    assert not caught.value.message.endswith(":")


@pytest.mark.parametrize(
    "text", ["[]", "5", "{", '{"model_type": "llama"', '{"a": ' * 200 + "1" + "}" * 200, "\x00\xff"]
)
def test_files_that_are_no_config(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json"):
        find(str(path))


def test_what_a_training_leaves_out_of_a_config_is_noted_and_looked_for_nowhere(tmp_path, offline):
    left_out = {"quantization_config": {"quant_method": "fp8"}, "_attn_implementation": KERNEL}
    source = find(written(tmp_path, **left_out))
    config = make_config(source, None, {})
    assert not hasattr(config, "quantization_config") and config._attn_implementation is None
    notes = "\n".join(notes_of_config(source.name, source_config(source)))
    assert "quantization_config (fp8)" in notes and KERNEL in notes
    assert count_parameters(source) == 2 * 64 * 32 + 3 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32
    eager = find(written(tmp_path, attn_implementation="eager"))
    assert make_config(eager, None, {})._attn_implementation == "eager"
    assert notes_of_config("m", source_config(eager)) == []


@pytest.mark.versions
def test_kernels_of_other_packages_are_noted():
    """Every model type that needs mamba-ssm or fla in this transformers, but those with stand-ins."""
    folder = Path(transformers.__file__).parent / "models"
    needs = re.compile(
        r'_with_fallback\(\s*"(?!causal_conv1d|selective_state|fused_recurrent)\w+",\s*"(mamba_ssm|fla)"'
    )
    found = {file.parent.name for file in folder.glob("*/modeling_*.py") if needs.search(file.read_text())}
    without = {name for name in found if not notes_of_config("m", {"model_type": name})}
    assert without == {"mamba", "falcon_mamba", "jamba"}
    assert notes_of_config("m", {"model_type": "llama"}) == []


def test_an_attention_kernel_is_an_argument_as_in_transformers(tmp_path, offline):
    """Other packages' kernels have the shapes of torch's."""
    source = find(written(tmp_path))
    found = {name: make_config(source, None, {"attn_implementation": name}) for name in ("eager", "flash_attention_2")}
    assert [config._attn_implementation for config in found.values()] == ["eager", "sdpa"]
    assert traced_args({"attn_implementation": "flash_attention_2", "n_layer": 2}) == {"n_layer": 2}
    assert traced_args({"attn_implementation": "eager", "dtype": "bfloat16"}) == {"attn_implementation": "eager"}
    with pytest.raises(ModelError, match="attn_implementation is 'flash'"):
        make_config(source, None, {"attn_implementation": "flash"})


def stored_in_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Write a Llama whose matrices are float8 in blocks of 128; return what its weights are."""
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(folder)
    held = load_file(folder / "model.safetensors")
    weights = dict(held)
    for name in [name for name in held if name.endswith("proj.weight")]:
        held[name] = (weights[name] * 2).to(torch.float8_e4m3fn)
        held[f"{name}_scale_inv"] = torch.full([size // 128 for size in held[name].shape], 0.5)
        weights[name] = held[name].float() * 0.5
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    quantized(folder, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"})
    return weights


def quantized(folder: Path, how: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))


def test_weights_in_float8_are_made_whole_as_they_are_read(tmp_path, offline):
    weights = stored_in_fp8(tmp_path)
    model = build(find(str(tmp_path)), None, {})
    assert not hasattr(model.config, "quantization_config")
    found = model.state_dict()
    assert {name for name in found if not torch.equal(found[name], weights[name])} == set()


def test_weights_that_stay_quantized_are_not_trained(tmp_path):
    stored_in_fp8(tmp_path)
    quantized(tmp_path, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match=r"quantized weights \(gptq\)"):
        source_of(Run(model=str(tmp_path)))
    assert source_of(Run(model=str(tmp_path / "config.json"))).origin == "config.json"


def test_a_width_that_is_none_is_not_counted_with():
    assert width(64, 10_000) == 64
    assert [width(of_config, 10_000) for of_config in (None, 0, -3, [[]], "a", True)] == [100] * 6


def test_a_model_with_code_of_its_own_is_simulated_with_its_script(tmp_path):
    own = {"model_type": "my_llm", "auto_map": {"AutoModelForCausalLM": "modeling_my_llm.MyForCausalLM"}}
    with pytest.raises(ModelError, match="no model_type 'my_llm'") as caught:
        make_config(find(written(tmp_path, **own)), None, {})
    assert "zerofit simulate -- COMMAND" in caught.value.hint


@pytest.mark.parametrize(("name", "tool"), [("m.gguf", "gguf_file=NAME"), ("params.json", "convert_llama_weights")])
def test_weights_of_other_formats_are_refused_with_their_conversion(tmp_path, name, tool):
    (tmp_path / name).write_text('{"dim": 4096}' if name.endswith("json") else "GGUF\3")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ModelError) as caught:
            find(str(path))
        assert tool in caught.value.hint


def test_a_folder_of_the_hubs_cache_names_its_newest_snapshot(tmp_path):
    for name in ("a" * 40, "b" * 40):
        (snapshot := tmp_path / "models--org--name" / "snapshots" / name).mkdir(parents=True)
        written(snapshot)
    with pytest.raises(ModelError, match="has no config") as caught:
        find(str(tmp_path / "models--org--name"))
    assert caught.value.hint.endswith(f"use {snapshot}") and make_config(find(str(snapshot)), None, {})
