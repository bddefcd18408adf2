"""Evaluation and text generation with a trained model, for the command line and from Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

from zerofit.data.opening import split_name
from zerofit.infer.evaluate import EvalSamples, EvalScores, figures_of, open_eval_data, scratch_folder
from zerofit.infer.evaluate import evaluate as evaluate_model
from zerofit.infer.evaluate import working_bytes as eval_bytes
from zerofit.infer.generate import GeneratedText, GenerationRequest, Transcript, check_prompt, converse, open_chat
from zerofit.infer.generate import generate as generate_text
from zerofit.infer.generate import working_bytes as generation_bytes
from zerofit.infer.limits import Device, read_limits
from zerofit.infer.saved_model import find_folder
from zerofit.infer.session import InferenceSession, PlacementResult, open_model
from zerofit.spec.errors import Problems
from zerofit.spec.events import Event, OnEvent, Reporter
from zerofit.spec.model_facts import Precision
from zerofit.spec.run import Run, load_run

MICRO_BATCH = 8
MaxMemory = str | Mapping[Device, str | int] | None


class EvalDataOptions(TypedDict, total=False):
    """Fields of Run that select the evaluation data. By default, the training data are used."""

    data: str | None
    data_root: Path | None
    download: bool | None
    text_field: str | None
    pair_field: str | None
    label_field: str | None
    target_len: int | None
    generate_samples: int | None
    tokenizer: str | None
    chat_template: Path | None
    packing: bool | None
    stream: bool | None
    image_size: int | None
    skip_bad: bool | None
    seed: int | None
    micro_batch: int | None
    seq_len: int | None
    eval_samples: int | None


class InferenceOptions(TypedDict, total=False):
    """Options for the placement and the type of a model's weights.

    `max_memory`: the devices that may be used, each with a limit, such as {0: "20GiB", "cpu": "60GiB"}. By default
    all devices are used, with most of their free memory.

    `offload_folder`: a folder for weights that have to be converted first.

    `trust_model_code`: allow the import and the call of a custom model `package.module:callable`.
    """

    max_memory: MaxMemory
    offload_folder: Path | None
    dtype: Precision | None
    trust_model_code: bool
    on_event: OnEvent | None


@dataclass(frozen=True, kw_only=True)
class Evaluation(EvalScores, PlacementResult):
    """A model's scores, and where its weights were placed."""

    model: str
    data: str


@dataclass(frozen=True, kw_only=True)
class Generation(GeneratedText, PlacementResult):
    """Text that a model generated, and where its weights were placed."""


@dataclass(frozen=True, kw_only=True)
class ChatResult(Transcript, PlacementResult):
    """The turns of a conversation with a model, and where its weights were placed."""


class EvaluateOptions(EvalDataOptions, InferenceOptions, total=False):
    """Options of `evaluate` other than the folder."""


# All three functions load a model in the same way: `open_model` reads it without its weights, `working_bytes` forecasts
# what the computation needs, and `session.load` places the weights so that this memory stays free.
def evaluate(folder: str | Path, **options: Unpack[EvaluateOptions]) -> Evaluation:
    """Evaluate the model of a run folder, of a checkpoint, or in a Hugging Face model folder.

    Keyword arguments are those of EvalDataOptions and InferenceOptions.

    >>> import zerofit as zf
    >>> run = zf.train(zf.Run(model="mlp", data="digits", steps=20, ranks=1, output="runs/mlp"))
    >>> result = zf.evaluate(run.run_dir, eval_samples=20, max_memory={"cpu": "1GiB"})
    >>> result.samples, 0 <= result.accuracy <= 1, result.device_map
    (20, True, {'': 'cpu'})

    Raises UserError for bad input (all problems at once), DoesNotFit if the weights do not fit into the allowed
    memory, and RunFailed if the model fails.
    """
    report, problems = Reporter(options.get("on_event")), Problems()
    run_fields = {name: options[name] for name in EvalDataOptions.__annotations__ if options.get(name) is not None}
    problems.attempt(lambda: load_run(None, run_fields))
    if "data" in run_fields:
        problems.attempt(lambda: split_name(run_fields["data"]))
    with _opened(Path(folder), options, problems, report) as session:
        data = open_eval_data(session.saved, run_fields, report)
        samples = EvalSamples(
            at_once=run_fields.get("micro_batch", MICRO_BATCH),
            limit=run_fields.get("eval_samples"),
            generated=run_fields.get("generate_samples", Run().generate_samples),
        )
        figures = figures_of(session.saved, session.empty, session.dtype, data.inputs)
        # The devices must have room for activations next to the weights, so their bytes are needed before the load.
        needed = eval_bytes(session.empty, figures, data.inputs, samples.at_once, session.main, str(folder))
        if not needed:
            report.note("cannot forecast the memory of this model's activations")
        model, placement = session.load(needed, "a smaller --micro-batch, a shorter --seq-len,")
        scores = evaluate_model(model, figures, data, samples, placement.execution_device, report)
        return Evaluation(model=str(folder), data=data.name, **vars(scores), **vars(session.result(placement)))


def generate(
    folder: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.7,
    top_p: float = 1.0,
    seed: int = 0,
    tokenizer: str | None = None,
    **options: Unpack[InferenceOptions],
) -> Generation:
    """Continue `prompt` with a causal language model.

    `on_event` gets each piece of the text as an event of kind "text". With `temperature` 0 every token is the most
    likely one. Otherwise tokens are sampled from the most likely tokens that together have probability `top_p`. Other
    keyword arguments are those of InferenceOptions. Raises the errors of `evaluate`.

    >>> import zerofit as zf
    >>> text = zf.Run(model="llama-tiny", data="synthetic", seq_len=32, steps=1, ranks=1, output="runs/text")
    >>> zf.generate(zf.train(text).run_dir, "def ", max_new_tokens=5).tokens <= 5
    True
    """
    report, problems = Reporter(options.get("on_event")), Problems()
    if not prompt:
        problems.add("empty-prompt", "--prompt is empty", "use the first words of the text", "--prompt")
    with _opened(Path(folder), options, problems, report) as session:
        request = GenerationRequest(
            prompt=check_prompt(session.saved, tokenizer, prompt, max_new_tokens),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        # The memory is forecast on the empty model, before a weight is read. So a misfit is refused within seconds.
        needed = generation_bytes(session.empty, request, session.main)
        model, placement = session.load(needed, "a smaller --max-new-tokens,")
        device = placement.execution_device
        text = generate_text(model, request, device, lambda piece: report.on_event(Event(kind="text", text=piece)))
        return Generation(**vars(text), **vars(session.result(placement)))


def chat(
    folder: str | Path,
    turns: Iterable[str],
    *,
    system: str | None = None,
    chat_template: str | Path | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.7,
    top_p: float = 1.0,
    seed: int = 0,
    tokenizer: str | None = None,
    **options: Unpack[InferenceOptions],
) -> ChatResult:
    """Chat with a causal language model; return all turns.

    `on_event` gets each piece of an answer as an event of kind "text". `turns` are the user's messages; each is read
    when the answer to the previous one is complete. The chat template is the model's own unless `chat_template` names
    one (`chatml`, `llama3`, ..., or a file). The other keyword arguments are those of `generate`; `max_new_tokens`
    limits each answer.

    >>> import zerofit as zf
    >>> text = zf.Run(model="llama-tiny", data="synthetic", seq_len=32, steps=1, ranks=1, output="runs/text")
    >>> said = zf.chat(zf.train(text).run_dir, ["Hello", "2 + 2?"], max_new_tokens=5)
    >>> [turn["role"] for turn in said.turns]
    ['user', 'assistant', 'user', 'assistant']

    Raises the errors of `generate`, and UserError for a model without a chat template.
    """
    report, problems = Reporter(options.get("on_event")), Problems()
    with _opened(Path(folder), options, problems, report) as session:
        opened = open_chat(
            session.saved,
            tokenizer,
            None if chat_template is None else Path(chat_template),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        needed = generation_bytes(session.empty, opened.largest_request(), session.main)
        model, placement = session.load(needed, "a smaller --max-new-tokens,")
        device = placement.execution_device
        transcript = converse(
            model, opened, turns, system, device, lambda piece: report.on_event(Event(kind="text", text=piece))
        )
        return ChatResult(**vars(transcript), **vars(session.result(placement)))


@contextmanager
def _opened(
    folder: Path, options: InferenceOptions, problems: Problems, report: Reporter
) -> Iterator[InferenceSession]:
    limits = problems.attempt(lambda: read_limits(options.get("max_memory")))
    model_folder = problems.attempt(lambda: find_folder(folder, report))
    problems.raise_if_any()
    assert limits is not None and model_folder is not None  # else a problem has been raised
    with scratch_folder(options.get("offload_folder")) as scratch:
        trusted = options.get("trust_model_code", False)
        saved, dtype = open_model(model_folder, options.get("dtype"), scratch, report, trusted)
        yield InferenceSession(saved=saved, dtype=dtype, limits=limits, scratch=scratch, report=report)
