"""Repositories on the hub that have the shape of a preset."""

from __future__ import annotations

from zerofit.models.presets import PRESETS

_OWNERS = {  # by the beginning of a preset's name
    "gpt2": "openai-community",
    "llama": "meta-llama",
    "qwen": "Qwen",
    "t5": "google-t5",
    "flan-t5": "google",
    "bart": "facebook",
    "dinov2": "facebook",
    "whisper": "openai",
    "clip": "openai",
    "siglip": "google",
    "gemma": "google",
    "llava": "llava-hf",
    "mamba": "state-spaces",
    "phi": "microsoft",
    "opt": "facebook",
    "falcon": "tiiuae",
    "smollm": "HuggingFaceTB",
    "deepseek": "deepseek-ai",
    "gpt-oss": "openai",
}
_ELSEWHERE = {  # repositories on the hub whose names are not their owner's and the preset's
    **{f"google/t5-v1_1-{size}": f"flan-t5-{size}" for size in ("small", "base", "large", "xl", "xxl")},
    "meta-llama/llama-4-scout-17b-16e": "llama-4-scout",
    "meta-llama/llama-4-maverick-17b-128e": "llama-4-maverick",
    "mistralai/mistral-7b-v0.3": "mistral-7b",
    "mistralai/mistral-7b-instruct-v0.3": "mistral-7b",
    "mistralai/mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mistralai/mixtral-8x22b-v0.1": "mixtral-8x22b",
    "deepseek-ai/deepseek-r1": "deepseek-v3",
    "allenai/olmo-2-0425-1b": "olmo-2-1b",
    "allenai/olmo-2-1124-7b": "olmo-2-7b",
    "allenai/olmo-2-1124-13b": "olmo-2-13b",
    "microsoft/phi-3-mini-4k-instruct": "phi-3-mini",
    "microsoft/phi-3-medium-4k-instruct": "phi-3-medium",
    "google-bert/bert-base-uncased": "bert-base",
    "google-bert/bert-large-uncased": "bert-large",
    "google/vit-base-patch16-224": "vit-b-16-hf",
    "google/vit-large-patch16-224": "vit-l-16-hf",
}
_DENOISERS = {  # repositories of diffusers' pipelines, by their denoiser
    "stable-diffusion-v1-5/stable-diffusion-v1-5": "stable-diffusion-1.5",
    "runwayml/stable-diffusion-v1-5": "stable-diffusion-1.5",
    "stabilityai/stable-diffusion-2-1": "stable-diffusion-2.1",
    "stabilityai/stable-diffusion-xl-base-1.0": "sdxl",
    "facebook/dit-xl-2-256": "dit-xl-2",
    "facebook/dit-xl-2-512": "dit-xl-2-512",
    "stabilityai/stable-diffusion-3-medium-diffusers": "stable-diffusion-3-medium",
    "stabilityai/stable-diffusion-3.5-medium": "stable-diffusion-3.5-medium",
    "stabilityai/stable-diffusion-3.5-large": "stable-diffusion-3.5-large",
    "black-forest-labs/flux.1-dev": "flux.1-dev",
    "black-forest-labs/flux.1-schnell": "flux.1-schnell",
}
_TUNED = ("-instruct", "-chat", "-base", "-hf", "-it", "-pt")  # of the same shape


def shape_on_hub(repository: str) -> str | None:
    """Return the preset that has the shape of a repository on the hub ("Qwen/Qwen3-8B"); None where none has.

    >>> shape_on_hub("meta-llama/Llama-3.1-8B-Instruct"), shape_on_hub("mistralai/Mistral-7B-v0.1")
    ('llama-3.1-8b', None)
    """
    name = repository.lower().replace("meta-llama/meta-", "meta-llama/")
    if name in _DENOISERS:
        return _DENOISERS[name]
    while True:
        owner, _, model = name.partition("/")
        belongs = any(model.startswith(start) and owner == whose.lower() for start, whose in _OWNERS.items())
        if name in _ELSEWHERE or (belongs and model in PRESETS):
            return _ELSEWHERE.get(name, model)
        shorter = next((name.removesuffix(end) for end in _TUNED if name.endswith(end)), None)
        if shorter is None:
            return None
        name = shorter
