"""Names as people type them: the preset of the same shape with a note, or what the family has."""

import pytest

from zerofit.models.catalog import ModelError, find
from zerofit.models.names import left_out, model_table, preset_of, relatives
from zerofit.models.presets import NAMED
from zerofit.spec.errors import UserError

TYPED = """
meta-llama/Llama-3.1-8B-Instruct=llama-3.1-8b meta-llama/Meta-Llama-3.1-8B=llama-3.1-8b
meta-llama/Llama-2-7b-chat-hf=llama-2-7b NousResearch/Llama-2-7b-hf=llama-2-7b
meta-llama/Meta-Llama-3-8B=llama-3-8b meta-llama/Llama-3.3-70B-Instruct=llama-3.1-70b llama3-8b=llama-3-8b
llama3.1:70b=llama-3.1-70b unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit=llama-3.1-8b
unsloth/llama-3-8b-bnb-4bit=llama-3-8b unsloth/Llama-3.2-1B-Instruct=llama-3.2-1b
codellama/CodeLlama-7b-hf=codellama-7b codellama:13b=codellama-13b Qwen/Qwen3-8B=qwen3-8b qwen3:8b=qwen3-8b
QWEN3_8B=qwen3-8b unsloth/Qwen3-14B-unsloth-bnb-4bit=qwen3-14b Qwen/Qwen3-4B-Instruct-2507=qwen3-4b-2507
Qwen/Qwen3-4B-Thinking-2507-FP8=qwen3-4b-2507 Qwen/Qwen3-Coder-30B-A3B-Instruct=qwen3-30b-a3b-2507
qwen3:30b-a3b=qwen3-30b-a3b Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4=qwen2.5-7b
Qwen/Qwen2.5-Coder-32B-Instruct=qwen2.5-32b Qwen/QwQ-32B=qwen2.5-32b deepseek-ai/DeepSeek-V3.1=deepseek-v3
deepseek-ai/DeepSeek-R1-0528=deepseek-v3 deepseek-ai/DeepSeek-R1-Distill-Qwen-7B=qwen2.5-7b
deepseek-r1:7b=qwen2.5-7b deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B=deepseek-r1-distill-qwen-1.5b
deepseek-ai/DeepSeek-R1-Distill-Llama-70B=llama-3.1-70b
deepseek-ai/deepseek-coder-6.7b-instruct=deepseek-coder-6.7b mistralai/Mistral-7B-v0.1=mistral-7b-v0.1
mistralai/Mistral-7B-Instruct-v0.2=mistral-7b-v0.2 mistralai/Mistral-7B-Instruct-v0.3=mistral-7b
TheBloke/Mistral-7B-Instruct-v0.2-AWQ=mistral-7b-v0.2
mistralai/Mistral-Small-24B-Instruct-2501=mistral-small-24b mistral-nemo=mistral-nemo-12b
mistralai/Mixtral-8x7B-Instruct-v0.1=mixtral-8x7b moonshotai/Kimi-K2-Instruct=kimi-k2
google/gemma-3-1b-it=gemma-3-1b google/gemma-3-27b-it-qat-q4_0-gguf=gemma-3-27b gemma2:9b=gemma-2-9b
microsoft/phi-4=phi-4 microsoft/Phi-3-mini-4k-instruct=phi-3-mini microsoft/phi-1_5=phi-1.5
allenai/OLMo-2-1124-7B=olmo-2-7b HuggingFaceTB/SmolLM2-135M-Instruct=smollm2-135m gpt-oss:20b=gpt-oss-20b
zai-org/GLM-4.6=glm-4.6 EleutherAI/pythia-160m-deduped=pythia-160m bigscience/bloom-7b1=bloom-7b1
openai-community/gpt2=gpt2 google-t5/t5-base=t5-base bert-base-uncased=bert-base
google-bert/bert-base-cased=bert-base-cased FacebookAI/roberta-base=roberta-base
answerdotai/ModernBERT-base=modernbert-base openai/whisper-small.en=whisper-small.en
microsoft/deberta-v3-base=deberta-v3-base google/vit-base-patch16-224=vit-b-16-hf microsoft/resnet-50=resnet50
openai/clip-vit-base-patch32=clip-vit-base-patch32 state-spaces/mamba-130m-hf=mamba-130m simple-cnn=simplecnn
llava-hf/llava-1.5-7b-hf=llava-1.5-7b Qwen/Qwen2.5-VL-7B-Instruct=qwen2.5-vl-7b
runwayml/stable-diffusion-v1-5=stable-diffusion-1.5 somebody/Llama-3.1-8B=llama-3.1-8b
"""


@pytest.mark.parametrize("typed", TYPED.split())
def test_what_people_type(typed):
    name, _, preset = typed.partition("=")
    match = preset_of(name)
    assert match and match.name == preset


def test_every_repository_is_found():
    for preset in NAMED.values():
        for name in (preset.name, *preset.hub):
            match = preset_of(name)
            assert match and match.name == preset.name, name


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("qwen3-8b", ""),
        ("Qwen/Qwen3-8B", ""),
        ("Qwen/Qwen3-8B-Base", ""),
        ("qwen3:8b", "using qwen3-8b for qwen3:8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "using llama-3.1-70b for meta-llama/Llama-3.3-70B-Instruct"),
        ("somebody/Qwen3-8B", "using qwen3-8b for somebody/Qwen3-8B"),
    ],
)
def test_a_note_says_what_a_name_is_taken_for(name, note):
    match = preset_of(name)
    assert match and match.note == note


@pytest.mark.parametrize("form", ["bnb-4bit", "GGUF", "AWQ", "GPTQ-Int4", "FP8", "w4a16", "4bit"])
def test_of_quantized_weights_only_the_shape_is_taken(form):
    match = preset_of(f"unsloth/Qwen3-8B-{form}")
    assert match and match.name == "qwen3-8b" and "quantized weights cannot be trained" in match.note


@pytest.mark.parametrize(
    ("name", "family", "others"),
    [
        ("granite", "granite-3.1-8b", ["flan-t5-small"]),
        ("qwen3", "qwen3-8b", ["qwen2.5-7b"]),
        ("qwen3:7b", "qwen3-8b", ["qwen2.5-7b"]),
        ("qwen2.5-8b", "qwen2.5-7b", ["qwen3-8b"]),
        ("llama-3.1-9b", "llama-3.1-8b", ["llama-2-7b"]),
        ("llama-3.3-8b", "meta-llama/Llama-3.3-70B-Instruct", ["llama-3.1-8b"]),
        ("llama-70b", "llama-2-70b", ["qwen2.5-72b"]),
        ("mistral-small", "mistral-small-24b", ["mistral-7b"]),
        ("bert", "bert-base", ["roberta-base"]),
        ("deepseek-r1:8b", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", ["deepseek-coder-6.7b"]),
        ("somebody/gemma-2-3b-tuned", "gemma-2-2b", ["gemma-3-4b"]),
    ],
)
def test_another_size_or_generation_is_never_taken(name, family, others):
    assert preset_of(name) is None
    assert family in relatives(name) and not set(others) & set(relatives(name))


def test_an_error_lists_the_family():
    with pytest.raises(ModelError) as caught:
        find("granite")
    assert "known in that family: granite-3.0-2b, " in caught.value.hint


def test_names_of_no_family():
    assert relatives("zzzzzz") == [] and relatives("lama-3.1-8b")[0] == "llama-3.1-8b"


def test_what_a_preset_leaves_out():
    assert left_out("llama-4-scout") == "llama-4-scout is only the text model, without the image encoder"
    assert left_out("gpt2") == left_out("./folder") == ""


def test_the_table_and_its_words():
    row = {"name": "bert-base", "kind": "masked-lm", "parameters": 109_514_298, "source": "preset"}
    assert row in model_table() and len(model_table()) >= 300
    assert [row["name"] for row in model_table(("Qwen2.5", "3b"))] == ["qwen2.5-3b", "qwen2.5-vl-3b"]
    assert [row["name"] for row in model_table(("kimi-k2-instruct",))] == ["kimi-k2"]
    with pytest.raises(UserError, match="no model matches zzz"):
        model_table(("zzz",))
