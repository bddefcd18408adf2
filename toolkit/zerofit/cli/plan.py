"""`zerofit plan`: which layouts fit and how fast they are, before any GPU is there."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from zerofit.cli.answer import answer
from zerofit.cli.hardware_options import OPTIONS, clusters, hardware_options
from zerofit.cli.options import run_options
from zerofit.spec.precision import PRECISIONS

FINDING = 1
RUN_FIELDS = (
    *("model_args", "micro_batch", "gradient_accumulation_steps", "global_batch", "seq_len"),
    *("activation_checkpointing", "tensor_parallel", "pipeline", "sequence_parallel"),
)
FROM_HELP = "folder of `zerofit tune`: step times are corrected by its trials, for any model and batch on such devices"
WRITE_HELP = "folder for ds_config.json, run.yaml of the best, or of a plainer one less than 3% slower"
PRECISION_HELP = "bf16 where the device has it, fp16 before Ampere, fp32 on a CPU; with --profile the profile's"


@click.command()
@click.argument("model", required=False)
@hardware_options(*OPTIONS, kinds="h100-80gb, ..., cpu; several to compare")
@click.option("--nvme-path", default="/local_nvme", show_default=True, help="where the disks are, for --write")
@click.option("--input", "image", metavar="image:CxHxW", help="what an image model is fed")
@click.option("--profile", type=click.Path(path_type=Path), help="plan from a stored profile, without torch")
@click.option("--from", "tuned", type=click.Path(path_type=Path), help=FROM_HELP)
@click.option("--write", type=click.Path(path_type=Path), help=WRITE_HELP)
@click.option("--max", "maximum", type=click.Choice(["seq-len", "micro-batch", "layers"]), help="the largest that fits")
@click.option("--min", "minimum", type=click.Choice(["gpus"]), help="how few devices are enough")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="layouts to print")
@click.option("--precision", type=click.Choice(PRECISIONS), help=f"[{PRECISION_HELP}]")
@run_options(RUN_FIELDS)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
def plan(model: str | None, as_json: bool, **options: Any) -> None:
    """Rank the layouts of MODEL that fit a cluster, with memory and speed, and say why the others do not.

    Without hardware flags: this machine. Exit code 0: something fits, 1: nothing does, 2: bad input.
    """
    from zerofit.cli.plan_show import show

    found: dict[str, Any] = {}

    def work() -> dict[str, Any]:
        found.update(_plan(model, options))
        return found

    answer(work, as_json, show)
    sys.exit(0 if found["layouts"] else FINDING)


def _plan(model: str | None, options: dict[str, Any]) -> dict[str, Any]:
    from zerofit.app.model_inputs import parse_image
    from zerofit.app.planning.corrections import read_tuned, refuse_other_device
    from zerofit.app.planning.files import refuse_existing
    from zerofit.app.planning.flags import early_problems
    from zerofit.spec.errors import Problems
    from zerofit.spec.load import load_run

    start, problems = time.perf_counter(), Problems()
    flags = {name: options[name] for name in RUN_FIELDS if options[name] is not None}
    problems.attempt(lambda: load_run(None, flags))  # refuses --micro-batch 0 and the like
    if (model is None) == (options["profile"] is None):
        problems.add("usage", "a plan is made for MODEL or from --profile FILE", "give one of them", "MODEL")
    for problem in early_problems(model, options):
        problems.add(problem.kind, problem.message, problem.hint, problem.where)
    if options["maximum"] and options["minimum"]:
        problems.add("usage", "--max and --min are two questions", "ask one of them", "--max, --min")
    if options["image"]:
        problems.attempt(lambda: parse_image(options["image"]))
    if options["write"]:
        problems.attempt(lambda: refuse_existing(options["write"]))
    found = problems.attempt(lambda: clusters(**{name: options[name] for name in ("kinds", *OPTIONS)}))
    options["tuned"] = problems.attempt(lambda: read_tuned(options["tuned"])) if options["tuned"] else None
    for cluster in found or () if options["tuned"] else ():
        problems.attempt(lambda cluster=cluster: refuse_other_device(options["tuned"], cluster.device.kind))
    problems.raise_if_any()
    result = _answered(model, options, found)
    result["total_s"] = round(time.perf_counter() - start, 3)
    return result


def _answered(model: str | None, options: dict[str, Any], found: list[Any]) -> dict[str, Any]:
    """The answer for the best of the clusters, with the others beside it where there are several."""
    results = [_for_cluster(model, options, cluster) for cluster in found]
    results.sort(key=lambda pair: -pair[0]["layouts"][0]["samples_per_s"] if pair[0]["layouts"] else 0.0)
    result, (question, answered) = results[0]
    if len(results) > 1:
        result["boxes"] = [_box(one) for one, _ in results]
    if options["write"] and answered.layouts:
        from zerofit.app.planning.files import write_plan

        extra = (options["model_args"] or {}, options["image"], options["nvme_path"])
        number = result["plainest"] or 0  # a forecast of time cannot tell it from the first
        result["written"] = write_plan(options["write"], answered.layouts[number].layout, question.profile, *extra)
        result["written_layout"] = number
    return result


def _for_cluster(model: str | None, options: dict[str, Any], cluster: Any) -> tuple[dict[str, Any], tuple[Any, Any]]:
    from zerofit.app.planning import questions as questions

    question, place = _question(model, options, cluster)
    asked: dict[str, Any] = {}
    if options["maximum"]:
        question, asked = questions.maximum(question, cluster, options["maximum"], lambda m: click.echo(m, err=True))
    elif options["minimum"]:
        smallest = questions.fewest(question, cluster)
        cluster = smallest or cluster
        ranks = {"value": smallest.ranks, "gpus": smallest.gpus, "nodes": smallest.nodes} if smallest else {}
        asked = {"min": "gpus", "value": None, "looked_up_to": questions.MOST_GPUS, **ranks}
    answered = questions.best(question, cluster)
    result = answered.to_dict()
    result["top"] = options["top"]
    result["tuned"] = options["tuned"].as_dict() if options["tuned"] else None
    result["profile"] = str(place) if place and options["maximum"] != "seq-len" else None
    if asked:
        result["asked"] = asked
    if not answered.layouts:
        result["remedies"] = questions.remedies(question, cluster)
    return result, (question, answered)


def _question(model: str | None, options: dict[str, Any], cluster: Any) -> tuple[Any, Path | None]:
    """The question about this cluster, and where its profile lies."""
    from zerofit.app.planning.flags import refuse_meaningless
    from zerofit.app.planning.profiles import ProfileRequest, get_profile, read_profile
    from zerofit.app.planning.questions import PlanQuestion, precision_of, traced_degrees
    from zerofit.plan.space import PlanRequest

    stored = read_profile(options["profile"]) if options["profile"] else None
    wish = PlanRequest(
        precision=precision_of(options["precision"], cluster, stored),
        global_batch=options["global_batch"],
        micro_batch=options["micro_batch"],
        accumulation=options["gradient_accumulation_steps"],
        tp=options["tensor_parallel"],
        pp=options["pipeline"],
        sp=options["sequence_parallel"],
        checkpointing=options["activation_checkpointing"],
    )
    asked = {"top": options["top"], "correct": options["tuned"].correct if options["tuned"] else None}
    if stored is not None:
        refuse_meaningless(stored, options)
        return PlanQuestion(profile=stored, wish=wish, **asked), options["profile"]
    wanted = ProfileRequest(
        model=model,
        precision=wish.precision,
        device="cpu" if cluster.on_cpu else "cuda",
        seq_len=options["seq_len"],
        image=options["image"],
        model_args=options["model_args"] or {},
        degrees=traced_degrees(wish),
    )
    profile, place = get_profile(wanted, lambda message: click.echo(message, err=True))
    refuse_meaningless(profile, options)
    wanted = replace(wanted, seq_len=profile.seq_len)
    return PlanQuestion(profile=profile, wish=wish, wanted=wanted, **asked), place


def _box(result: dict[str, Any]) -> dict[str, Any]:
    cluster = result["cluster"]
    best = result["layouts"][0] if result["layouts"] else None
    names = ("gpu", "gpus", "nodes", "ranks")
    return {**{name: cluster[name] for name in names}, "layout": best, "remedies": result.get("remedies", [])}
