"""`zerofit eval` and `zerofit generate`: use a trained model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole, answer_watched, out, print_facts, print_verdict
from zerofit.cli.options import AS_JSON, PATH, TRUST_MODEL_CODE, Number, add_options, given, run_options
from zerofit.cli.terminal import write_data
from zerofit.spec.events import Event
from zerofit.spec.model_facts import PRECISIONS
from zerofit.spec.units import counted, shown_bytes, shown_rate, shown_score

if TYPE_CHECKING:
    from zerofit.app.inference import ChatResult, Evaluation, Generation

DATA_FIELDS = (
    *("data", "data_root", "download", "text_field", "tokenizer", "chat_template", "packing", "image_size", "skip_bad"),
    *("stream", "seed", "micro_batch", "seq_len", "eval_samples"),
    *("pair_field", "label_field", "target_len", "generate_samples"),
)
HEAD_SCORES = ("macro_f1", "micro_f1", "rouge1", "rouge2", "rouge_l")
OFFLOAD_HELP = "folder for converted copies of weights that stay on disk [a temporary folder]"
MEMORY_HELP = "memory to use on each device, like 0=20GiB,cpu=60GiB; disk=0 excludes the disk [the free memory]"
NEW_TOKENS_HELP = "maximum number of new tokens [128; with --chat: 512 per answer]"
TEMPERATURE_HELP = "0 always selects the most likely token"
TOP_P_HELP = "sample from the most likely tokens whose probabilities add up to this"
placement_options = add_options(  # weights may be on GPUs, in host memory and on the disk
    click.option("--max-memory", metavar="DEVICE=SIZE,...", help=MEMORY_HELP),
    click.option("--offload-folder", type=click.Path(path_type=Path, file_okay=False), help=OFFLOAD_HELP),
    click.option("--dtype", type=click.Choice(PRECISIONS), help="type of the weights [as saved]"),
    TRUST_MODEL_CODE,
    AS_JSON,
)


@click.command(name="eval")
@click.argument("ckpt", type=PATH)
@run_options(DATA_FIELDS)
@placement_options
def evaluate(ckpt: Path, as_json: bool, **options: Any) -> None:
    """Evaluate CKPT: a run's folder, a checkpoint, an exported model, or any Hugging Face model's folder.

    Uses the validation samples of --data (default: the data that the model was trained on). Prints loss and
    perplexity for text, loss and accuracy for images (for masks also mean IoU), F1 for labeled text, and ROUGE for
    encoder-decoder models.

    Exit code 0: done, 1: the model does not fit into the memory that it may use, 2: bad input.
    """

    def work(console: EventConsole) -> Evaluation:
        console.say("looking at the model and the data ...")  # importing torch alone takes seconds
        from zerofit.app.inference import evaluate

        return evaluate(ckpt, on_event=console, **options)

    answer_watched(work, as_json, _show_scores)


def _show_scores(result: Evaluation) -> None:
    console = out()
    print_verdict(console, "EVALUATED", f"{counted(result.samples, 'sample')} of {result.data}, {result.model}")
    names = ("loss", "perplexity", "accuracy", "top5_accuracy", "mean_iou", *HEAD_SCORES)
    scores = {name.replace("_", " "): getattr(result, name) for name in names}
    facts = {name: shown_score(score) for name, score in scores.items() if score is not None}
    facts["speed"] = f"{shown_rate(result.samples_per_s)} samples/s"
    if result.tokens_per_s is not None:
        facts["speed"] += f", {result.tokens_per_s:,.0f} tokens/s"
    # Python and the libraries need memory before the model is loaded.
    for_model = result.peak_host_bytes - result.host_bytes_before
    facts["host memory"] = f"{shown_bytes(result.peak_host_bytes)}, {shown_bytes(for_model)} of it for the model"
    if result.peak_device_bytes is not None:
        facts["GPU memory"] = shown_bytes(result.peak_device_bytes)
    print_facts(console, facts.items(), indent=15)


@click.command()
@click.argument("ckpt", type=PATH)
@click.option("--prompt", help="beginning of the text")
@click.option("--chat", "chats", is_flag=True, help="chat: answer each line of standard input")
@click.option("--system", help="only with --chat: the system message")
# `generate` and `chat` have defaults of their own, so this option has none.
@click.option("--max-new-tokens", type=click.IntRange(min=1), help=NEW_TOKENS_HELP)
@click.option("--temperature", type=Number(0), default=0.7, show_default=True, help=TEMPERATURE_HELP)
@click.option("--top-p", type=Number(0, 1, min_open=True), default=1.0, show_default=True, help=TOP_P_HELP)
# torch's generators get seeds of 64 bits with a sign.
@click.option(
    "--seed", type=click.IntRange(min=0, max=2**63 - 1), default=0, show_default=True, help="random seed for sampling"
)
@run_options(("tokenizer", "chat_template"))
@placement_options
def generate(ckpt: Path, prompt: str | None, chats: bool, as_json: bool, **options: object) -> None:
    """Continue --prompt, or chat (--chat), with the model of CKPT: a run, a checkpoint or a model folder.

    The text is printed while the model writes it, to standard output (with --json to standard error). A chat ends
    with /exit or Ctrl-D. Exit code 0: done, 1: the model does not fit into the memory that it may use, 2: bad
    input.
    """
    # Equal values mean that both or neither of the two were given.
    if chats == (prompt is not None):
        raise click.UsageError("use either --prompt TEXT or --chat")
    if not chats:
        unused = [f"--{name.replace('_', '-')}" for name in ("system", "chat_template") if options[name]]
        if unused:
            raise click.UsageError(f"{' and '.join(unused)}: only with --chat")
        del options["system"], options["chat_template"]

    def work() -> Generation | ChatResult:
        with ExitStack() as until_text:
            console = until_text.enter_context(EventConsole())
            console.say("looking at the model ...")  # importing torch alone takes seconds
            from zerofit.app.inference import chat, generate

            def on_event(event: Event) -> None:
                if event.kind != "text":
                    console(event)
                    return
                # There is no live line after the first token, because it would overwrite the text.
                until_text.close()
                write_data(event.text, err=as_json)

            named = given({**options, "on_event": on_event})
            if prompt is None:
                return chat(ckpt, _typed_turns(until_text, as_json), **named)
            result = generate(ckpt, prompt, **named)
            # The text was written piece by piece, without a line break at its end.
            click.echo(err=as_json)
            return result

    def show(result: Generation | ChatResult) -> None:
        click.echo(f"{result.tokens} tokens, {result.tokens_per_s:.1f} tokens/s", err=True)

    answer(work, as_json, show)


def _typed_turns(until_text: ExitStack, as_json: bool) -> Iterator[str]:
    """Yield the user's messages until /exit or the end of standard input."""
    until_text.close()
    typed = sys.stdin.isatty() and sys.stdout.isatty()
    if typed:
        import readline as readline  # input() edits lines with it
    elif isinstance(sys.stdin, TextIOWrapper):
        # A program may send bytes that are not UTF-8. They should not end the chat.
        sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            line = input("> " if typed else "").strip()
        except EOFError:
            break
        if line == "/exit":
            return
        if line:
            yield line
            click.echo(err=as_json)  # ends the line of the answer
    if typed:
        click.echo()
