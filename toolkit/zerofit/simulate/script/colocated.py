"""Simulate TRL's vLLM: in the trainer's process (`vllm_mode="colocate"`) or as a server on other GPUs.

In the trainer's process, no kernel of vLLM runs. Weights, cache and activations have the sizes that `rollout.vllm`
computes by vLLM's rule.
Completions have their maximum length, as in `generation`.
A server's memory is not simulated. Rank 0 copies the weights into buffers that it sends, so it needs more memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from itertools import cycle
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.configuration_utils import PreTrainedConfig

from zerofit.rollout.phases import SENT_BUFFERS, SENT_BYTES
from zerofit.rollout.served import BITS, ServedModel
from zerofit.rollout.vllm import EngineMemory, EngineSettings
from zerofit.simulate.engine.phases import PhaseLog
from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.script.command import ScriptTarget
from zerofit.simulate.script.errors import not_simulated
from zerofit.simulate.script.evaluation import EVALUATION
from zerofit.simulate.script.generation import GENERATION
from zerofit.simulate.script.gpu import SHOWN
from zerofit.simulate.script.tracker import ScriptTracker
from zerofit.spec.memory_kinds import ENGINE
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from trl.generation.vllm_generation import VLLMGeneration  # pyright: ignore[reportMissingImports]


_PARAMETERS = ("SamplingParams", "StructuredOutputsParams", "GuidedDecodingParams", "RequestOutput")
VERSION = "0.27.0"  # of vLLM; also the release of `EngineSettings`
_PLAN = "zerofit plan MODEL --method, which plans trainer and rollout without the script"
_NAMES = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "gpu_memory_utilization")
_MORE = ("enforce_eager", "block_size", "quantization")
_CACHES = {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bfloat16": "bf16", "float16": "fp16"}
_TYPES = {"float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_NO_ROOM = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"  # in vLLM's words
_TOO_LONG = (
    "The model's max seq len ({}) is larger than the maximum number of tokens that can be stored in KV cache ({})"
)
_TRAINERS = 'use GRPOTrainer or RLOOTrainer of TRL 1.16, or vllm_mode="colocate"'
SYNC = "weight sync"


def colocated_vllm(meter: ScriptTracker, log: PhaseLog, target: ScriptTarget) -> None:
    """Replace the vllm package, installed or not, because vLLM's engine needs a GPU.

    The replacement has the names TRL uses. Other names can be imported, but raise an error when called. (sys.meta_path)
    """
    from transformers import TrainingArguments

    if not target.on_gpu:
        return
    sys.meta_path.insert(0, VllmFinder(partial(ColocatedEngine, meter, log, target)))
    original = TrainingArguments.__post_init__
    # TRL is imported only for scripts that use a server. Its arguments exist before the trainer connects to the server.
    connect = cache(partial(connect_server, meter, log))

    def checked(self: TrainingArguments) -> None:
        original(self)
        if getattr(self, "use_vllm", False) and getattr(self, "vllm_mode", "server") == "server":
            connect()

    replace_in(TrainingArguments, "__post_init__", checked)


class VllmFinder(Loader):
    """Import hook that finds vllm and its modules."""

    def __init__(self, engine: Callable[..., ColocatedEngine]):
        self.names: dict[str, object] = {"LLM": engine, **dict.fromkeys(_PARAMETERS, SimpleNamespace)}

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return the spec of vllm or of one of its modules; None for other names."""
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "vllm" else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module with the names that TRL uses. Other names raise an error when called."""

        def missing(name: str) -> object:
            if name.startswith("__"):  # the import system and pickle look for attributes such as __path__
                raise AttributeError(name)
            return partial(_not_simulated, f"{module.__name__}.{name}")

        vars(module).update(self.names, __version__=VERSION, __getattr__=missing)


def _not_simulated(name: str, *_: object, **__: object) -> object:
    raise not_simulated(name, f"use {_PLAN}")


class ColocatedEngine:
    """Replaces vllm.LLM, with the methods that TRL calls.

    Like vLLM, it raises ValueError if `gpu_memory_utilization` leaves no memory for a cache of one sequence.
    """

    def __init__(self, meter: ScriptTracker, log: PhaseLog, target: ScriptTarget, model: str, **given: object):
        config = AutoConfig.from_pretrained(model, trust_remote_code=bool(given.get("trust_remote_code")))
        served = ServedModel.of(model, config, _parameters(config))
        settings = _settings(config, given).settled(served, target.device)
        self._meter, self._log = meter, log
        self._memory = EngineMemory(model=served, settings=settings, device=target.device)
        self._token, self._sleeps = plain_token(config), bool(given.get("enable_sleep_mode"))
        self._tokenizer = cache(partial(AutoTokenizer.from_pretrained, model))
        self._held: dict[str, Tensor] = {}
        longest = SimpleNamespace(max_model_len=settings.max_model_len)
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load_weights))
        worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_config=longest, model_executor=worker)
        self._start()

    def _start(self) -> None:
        memory = self._memory
        # TRL's users see these two errors, so they get vLLM's own words
        if memory.sequences < 1:
            too_long = _TOO_LONG.format(memory.settings.max_model_len, memory.longest)
            raise ValueError(_NO_ROOM if memory.cache_bytes <= 0 else too_long)
        self._meter.note(f"vLLM: memory as vLLM {VERSION} computes it; generation time is not forecast")
        free = memory.device.memory_bytes - self._meter.live()
        if memory.requested > free:
            share = memory.settings.gpu_memory_utilization
            asked = f"utilization {share} needs {shown_bytes(memory.requested)}, but {shown_bytes(free)} are free"
            self._meter.note(f"vLLM refuses to start: {asked}", bound=True)
        # in vLLM's order: it measures a forward before it sizes the cache, and captures graphs last
        self._hold("weights", memory.weights)
        self._work()
        self._hold("kv_cache", memory.cache_bytes)
        self._hold("graphs", memory.graphs)

    def _hold(self, name: str, size: int) -> None:
        if name not in self._held and size:
            self._held[name] = torch.empty(size, dtype=torch.uint8, device=SHOWN)
            self._meter.tag(self._held[name], ENGINE)

    def _work(self) -> None:
        self._meter.tag(torch.empty(self._memory.activations, dtype=torch.uint8, device=SHOWN), ENGINE)

    def sleep(self, level: int = 1) -> None:
        """Free the weights and the cache. CUDA graphs stay allocated."""
        if level == 1:
            self._meter.note("vLLM sleeps at level 1: the host memory for its weights is not counted")
        for name in ("weights", "kv_cache"):
            self._held.pop(name, None)
        if self._log.name == GENERATION:
            end(self._log)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the weights and the cache that `sleep` freed.

        `tags`: "weights", "kv_cache" or both (the default).
        """
        names = tags or ("weights", "kv_cache")
        if "weights" in names:
            begin(self._log, SYNC)
            self._hold("weights", self._memory.weights)
        if "kv_cache" in names:
            begin(self._log, GENERATION)
            self._hold("kv_cache", self._memory.cache_bytes)

    def _load_weights(self, weights: object) -> None:
        """Begin the phase in which vLLM copies the trainer's weights."""
        # As in vLLM, nothing is allocated.
        begin(self._log, SYNC)

    def reset_prefix_cache(self) -> bool:
        """Drop cached prompts. TRL calls this after each weight sync."""
        if not self._sleeps:  # otherwise the weights stay awake until `wake_up` of the cache begins a phase
            end(self._log)
        return True

    def generate(self, prompts: Sequence[object], sampling_params: object = None, **_: object) -> list[SimpleNamespace]:
        """Return completions of the maximum length."""
        begin(self._log, GENERATION)
        self._work()
        found = [self._output(prompt, sampling_params) for prompt in prompts]
        if not self._sleeps:  # `sleep` follows at once, and no other phase holds the cache
            end(self._log)
        return found

    def _output(self, prompt: object, sampling: object) -> SimpleNamespace:
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        ids = self._tokenizer()(ids)["input_ids"] if isinstance(ids, str) else ids
        if not isinstance(ids, Sequence):
            raise not_simulated("vLLM with prompts of images or embeddings", "pass texts or prompt_token_ids")
        room = (self._memory.settings.max_model_len or 0) - len(ids)
        if room < 1:
            raise ValueError(f"The prompt's {len(ids)} tokens reach max_model_len {room + len(ids)}")
        # None: as many as the model's length allows
        tokens = min(getattr(sampling, "max_tokens", None) or room, room)
        wanted = getattr(sampling, "logprobs", None)
        # TRL reads for each token a dict from candidates to log-probs (`extract_logprobs`)
        sure = {self._token: SimpleNamespace(logprob=0.0, rank=1, decoded_token="")}
        logprobs = None if wanted is None else [sure] * tokens
        one = SimpleNamespace(token_ids=[self._token] * tokens, logprobs=logprobs, text="", finish_reason="length")
        return SimpleNamespace(prompt_token_ids=list(ids), outputs=[one] * (getattr(sampling, "n", None) or 1))


def _settings(config: PreTrainedConfig, given: Mapping[str, object]) -> EngineSettings:
    found = {name: given[name] for name in (*_NAMES, *_MORE) if given.get(name) is not None}
    if found.get("quantization") not in (None, *BITS):
        raise not_simulated(f"vLLM with quantization={found['quantization']}", f"use one of {', '.join(BITS)}")
    asked = str(given.get("dtype", "auto")).removeprefix("torch.")
    if asked == "auto":  # vLLM serves float32 checkpoints in bfloat16
        asked = "float16" if config.dtype == torch.float16 else "bfloat16"
    cache = _CACHES.get(str(given.get("kv_cache_dtype", "auto")), "auto")
    return EngineSettings.read({**found, "dtype": _TYPES.get(asked, "bf16"), "kv_cache_dtype": cache}, "vllm.LLM")


def _parameters(config: PreTrainedConfig) -> int:
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        build = cast("Callable[..., nn.Module] | None", kind._model_mapping.get(type(config), None))
        if build is not None:
            with _disable_current_modes(), torch.device("meta"):  # this model must not count
                return sum(parameter.numel() for parameter in build(config).parameters())
    raise not_simulated(f"vLLM with a {config.model_type}", "use a language model")


def connect_server(meter: ScriptTracker, log: PhaseLog) -> None:
    """Replace TRL's client, which would wait for a vLLM server.

    (trl/generation/vllm_generation.py)
    """
    try:
        from trl.generation.vllm_client import VLLMClient  # pyright: ignore[reportMissingImports]
        from trl.generation.vllm_generation import VLLMGeneration  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise not_simulated('vllm_mode="server" of this trainer', _TRAINERS) from None
    original = VLLMGeneration._init_vllm

    def connected(self: VLLMGeneration) -> None:
        if self.mode != "server":
            original(self)
            return
        if not self.accelerator.is_main_process:
            raise not_simulated('vllm_mode="server" on this rank', "use rank 0, which sends the weights")
        vars(self)["vllm_client"] = ServerClient(meter, log, self.model.config)

    def refused(*_: object, **__: object) -> None:
        raise not_simulated('vllm_mode="server" of this trainer', _TRAINERS)

    replace_in(VLLMGeneration, "_init_vllm", connected)
    replace_in(VLLMClient, "__init__", refused)


class ServerClient:
    """Replaces TRL's VLLMClient, with the methods that TRL's trainers call."""

    def __init__(self, meter: ScriptTracker, log: PhaseLog, config: PreTrainedConfig):
        self._log, self._token = log, plain_token(config)
        meter.note("vLLM's server runs on its own GPUs: zerofit plan MODEL --serve forecasts their memory")

    def get_server_info(self) -> dict[str, object]:
        """Return the part of the server's configuration that TRL reads."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int = 1, max_tokens: int = 16, logprobs: int | None = 0, **_: object
    ) -> dict[str, object]:
        """Return `n` completions of the maximum length for each prompt, in TRL's format."""
        begin(self._log, GENERATION)
        ids = [[self._token] * max_tokens for _ in range(n * len(prompts))]
        wanted = logprobs is not None
        end(self._log)
        return {
            "prompt_ids": [list(prompt) for prompt in prompts],
            "completion_ids": ids,
            "logprobs": [[[0.0]] * max_tokens for _ in ids] if wanted else None,
            "logprob_token_ids": [[[self._token]] * max_tokens for _ in ids] if wanted else None,
        }

    def update_named_params(self, metadata: object, named_params: Iterator[tuple[str, Tensor]]) -> None:
        """Pack all weights into buffers, as vLLM's code does.

        It fills one buffer while it sends another.
        """
        begin(self._log, SYNC)
        sent: list[Tensor | None] = [None] * SENT_BUFFERS
        for slot in cycle(range(SENT_BUFFERS)):
            sent[slot] = None  # vLLM frees a buffer before it fills the next one
            sent[slot] = _packed(named_params)
            if sent[slot] is None:
                return

    def reset_prefix_cache(self) -> None:
        """End the weight synchronization, after which TRL always calls this method."""
        end(self._log)


def _packed(weights: Iterator[tuple[str, Tensor]]) -> Tensor | None:
    """Return the next weights in one buffer; None after the last."""
    # Gathered weights live until they are copied.
    parts: list[Tensor] = []
    for _, weight in weights:
        parts.append(weight.contiguous().view(torch.uint8).view(-1))
        if sum(part.numel() for part in parts) > SENT_BYTES:
            break
    return torch.cat(parts) if parts else None


def begin(log: PhaseLog, name: str) -> None:
    """Begin a phase, except in an evaluation."""
    if log.name != EVALUATION:
        log.step = max(log.step, 0)
        log.begin(name)


def end(log: PhaseLog) -> None:
    """End vLLM's phase and begin phase "forward", except in an evaluation."""
    if log.name != EVALUATION:
        log.begin("forward")


def plain_token(config: PreTrainedConfig) -> int:
    """Return a token that is not an end-of-sequence token."""
    # special tokens usually have the first or the last numbers
    text = config.get_text_config()
    ends = [text.eos_token_id] if not isinstance(text.eos_token_id, list) else text.eos_token_id
    return next(token for token in range(text.vocab_size // 2, text.vocab_size) if token not in ends)
