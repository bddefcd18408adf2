"""Models that DeepSpeed's hybrid engine fails with, for DeepSpeed 0.19.8 and transformers 5."""

from __future__ import annotations

from zerofit.spec.extras import installed_version

_INIT = "deepspeed.initialize fails: "
_NO_WEIGHTS = "object has no attribute 'set_params_wo_copy'"
# the kernels fill their own KV cache; transformers' cache stays empty, so its mask of a new token has one element
SHORT_MASK = "generate() returns wrong tokens, because the kernels read beyond the attention mask of transformers 5"
_TUPLE = "generate() fails: 'tuple' object has no attribute 'size'"

# transformers' model types that DeepSpeed has inference kernels for -> what happens
# (deepspeed/runtime/hybrid_engine.py, module_inject/containers, model_implementations/transformers/ds_transformer.py)
HYBRID_ENGINE_FAULTS = {
    "bert": f"{_INIT}'DS_BERTContainer' {_NO_WEIGHTS}",
    "bloom": f"{_INIT}BLOOM needs transformers 4.43.4 or older",
    "clip": f"{_INIT}'NoneType' object has no attribute 'set_tensor_parallel_config'",
    "distilbert": f"{_INIT}'DS_DistilBERTContainer' {_NO_WEIGHTS}",
    "gpt2": f"{_INIT}'DS_GPT2Container' {_NO_WEIGHTS}",
    "gpt_neo": SHORT_MASK,
    "gpt_neox": f"{_INIT}'GPTNeoXAttention' object has no attribute 'hidden_size'",
    "gptj": SHORT_MASK,
    "llama": f"{_TUPLE}, or initialize fails with scaled RoPE",
    "roberta": f"{_INIT}'DS_BERTContainer' {_NO_WEIGHTS}",
}
# from 5.24 on, also if transformers is not installed here
if tuple(map(int, (installed_version("transformers") or "6.0").split(".")[:2])) >= (5, 24):
    HYBRID_ENGINE_FAULTS |= {"gptj": _TUPLE, "opt": _TUPLE}
WITHOUT_HYBRID_ENGINE = "remove hybrid_engine from the JSON: engine.module.generate() works without it"


def hybrid_engine_error(model_type: str, fault: str) -> str:
    """Return the message about the `fault` of a model under the hybrid engine."""
    return f"DeepSpeed's hybrid engine with {model_type}: {fault}"
