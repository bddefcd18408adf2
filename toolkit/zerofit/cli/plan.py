"""`zerofit plan`: find which layouts fit, and how fast they are, without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import click
from click.core import ParameterSource

from zerofit.cli.answer import BAD_INPUT, answer, fail
from zerofit.cli.console import EventConsole
from zerofit.cli.options import (
    AS_JSON,
    HARDWARE,
    INPUT,
    PATH,
    TRUST_MODEL_CODE,
    JsonObject,
    NameList,
    add_options,
    clusters,
    given,
    hardware_options,
    only_cluster,
    run_options,
)
from zerofit.cli.plan_show import COLUMNS, show, show_end, show_methods, show_rollouts, show_serving
from zerofit.cli.report import ENDINGS, HTML, write_page
from zerofit.features.engines import ENGINES
from zerofit.plan.layout import OFFLOADS
from zerofit.rollout.methods import METHODS
from zerofit.spec.errors import Problems
from zerofit.spec.files import refuse_target
from zerofit.spec.model_facts import DEFAULT_PRECISION, PRECISIONS
from zerofit.spec.partial_training import Method
from zerofit.spec.run import fields_of

if TYPE_CHECKING:
    from zerofit.app.planning.plan import Plan
    from zerofit.app.planning.request import PlanningRequest
    from zerofit.app.planning.rollouts import RolloutPlan
    from zerofit.app.planning.serving import ServingPlan
    from zerofit.app.planning.training_methods import MethodComparison
    from zerofit.spec.cluster import Cluster

FINDING = 1
WORK = {
    "tokens": {"metavar": "N", "help": "tokens of the training (with --epochs: of one epoch), like 300B or 15T"},
    "samples": {"metavar": "N", "help": "samples of the training (with --epochs: of one epoch)"},
    "epochs": {"type": float, "help": "passes over --tokens or --samples [1]"},
    "price": {
        "metavar": "USD",
        "help": "price per GPU hour: 2.5, or h100-80gb=2.5,l4=0.8 [the cloud node's list price]",
    },
    "mtbf": {"metavar": "HOURS", "help": "hours between failures of a GPU (50000) or a node (6000/node) [Llama 3's]"},
    "storage": {"metavar": "SIZE", "help": "bytes per second at which all ranks together write checkpoints"},
    "timed_by": {"type": PATH, "help": "use the save and start times measured in this run folder"},
}
FROM_HELP = "use the trials in this folder (from `zerofit tune`) to correct step times"
SERVE_HELP = "plan inference instead: whether the model fits in vLLM, and how many sequences run at once"
METHOD_HELP = "plan reinforcement learning, preferences or distillation: memory of trainer and rollout by phase"
ROLLOUT_HELP = "settings of vLLM for --serve (max_model_len=8192), or of TRL for --method, by their own names"
FROM_TRACE_HELP = "use measured kernel times from RUN_FOLDER/traces/rank-0-step-3.json (`train --profile`)"
COLUMNS_HELP = f"table columns to the right of the layout: {', '.join(COLUMNS)} [as many as fit the terminal]"
MEASURED_HELP = "measured speed of the layout given by flags, to scale all times: 5.33samples/s, 21000tokens/s or 0.52s"
WRITE_HELP = (
    "write run.yaml, accelerate.yaml or torchtitan.sh for the simplest layout that is about as fast as the best"
)
METHODS_HELP = "compare full,lora,qlora in one table, with the longest sequence that fits"
TRACE_HELP = "write the timeline of a step of the layout that --write chooses, in Chrome trace format for Perfetto"
PIN_HELP = "offload to page-locked host memory [the DeepSpeed JSON's pin_memory, else yes]"
LIGER_HELP = "forecast Liger's fused norms, rotary embeddings, SwiGLU and cross-entropy"
TENSOR_HELP = "assume that tensor parallel ranks also split norms, embedding, head and loss, as in Megatron"
THREADS_HELP = "OMP_NUM_THREADS of each rank, for an offloaded optimizer; torchrun and accelerate set 1 [all cores]"
SEARCHED = [name for name, entry in ENGINES.items() if not entry.only_methods]
ENGINE_HELP = "engines whose layouts are ranked: deepspeed, fsdp2 (Accelerate), torchtitan [deepspeed]"
PRECISION_HELP = f"{DEFAULT_PRECISION}; with --profile, the profile's precision"


# The options that only the table of layouts uses, not the answer to --serve, --method or --methods
UNREAD = {
    "serve": (
        *("method", "methods", "write", "image", "profile", "tuned", "measured", "from_trace", "maximum", "minimum"),
        *("engines", "nvme_path", "confirm", "trace", *WORK),
    ),
    "method": ("methods", "profile", "maximum", "minimum", "confirm", "trace", *WORK),
    "methods": ("rollout", "profile", "maximum", "minimum", "write", "html", "confirm", "trace", *WORK),
}


@click.command()
@click.argument("model", required=False)
@hardware_options(*HARDWARE, kinds="h100-80gb, p5.48xlarge, ..., cpu, or your own YAML file; several to compare")
@click.option("--nvme-path", default="/local_nvme", show_default=True, help="path of the NVMe disks, for --write")
@INPUT
@click.option("--profile", type=PATH, help="plan from a stored profile, without torch")
@click.option("--from", "tuned", type=PATH, help=FROM_HELP)
@click.option("--measured", metavar="SPEED", help=MEASURED_HELP)
@click.option("--from-trace", type=PATH, help=FROM_TRACE_HELP)
@click.option("--write", type=PATH, help=WRITE_HELP)
@click.option("--trace", type=PATH, help=TRACE_HELP)
@HTML
@click.option("--confirm", type=click.IntRange(min=0), default=0, metavar="N", help="also simulate the N best")
@click.option(
    "--max", "maximum", type=click.Choice(["seq-len", "micro-batch", "layers"]), help="find the largest value that fits"
)
@click.option("--min", "minimum", type=click.Choice(["gpus"]), help="find the smallest number of GPUs that fits")
@click.option("--methods", type=NameList("method", get_args(Method)), metavar="NAMES", help=METHODS_HELP)
@click.option("--method", type=click.Choice(list(METHODS)), help=METHOD_HELP)
@click.option("--serve", is_flag=True, help=SERVE_HELP)
@click.option("--rollout", type=JsonObject(), metavar="NAME=VALUE,...", help=ROLLOUT_HELP)
@click.option("--show-mesh", is_flag=True, help="print the mesh of ranks of the best layout")
@click.option(
    "--details", is_flag=True, help="print all figures of the best layout, and why each rejected layout does not fit"
)
@click.option("--columns", type=NameList("column", COLUMNS), metavar="NAMES", help=COLUMNS_HELP)
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="number of layouts to print")
@click.option("--precision", type=click.Choice(PRECISIONS), help=f"[{PRECISION_HELP}]")
@add_options(*(click.option("--" + name.replace("_", "-"), name, **of) for name, of in WORK.items()))
@click.option(
    "--engine", "engines", type=NameList("engine", SEARCHED), metavar="NAMES", default="deepspeed", help=ENGINE_HELP
)
@click.option("--zero-stage", type=click.IntRange(0, 3), help="ZeRO stage [any that fits]")
@click.option("--offload", type=click.Choice(OFFLOADS), help="device of the optimizer states [any that fits]")
@click.option(
    "--offload-param", type=click.Choice(OFFLOADS), help="device of the parameters, at stage 3 [any that fits]"
)
@click.option("--overlap-comm/--no-overlap-comm", default=None, help="reduce gradients during backward")
@click.option("--pin-memory/--no-pin-memory", default=None, help=PIN_HELP)
@click.option("--liger-kernel", is_flag=True, default=None, help=LIGER_HELP)
@click.option("--tensor-sequence-parallel", is_flag=True, default=None, help=TENSOR_HELP)
@click.option("--cpu-threads", type=click.IntRange(min=1), metavar="N", help=THREADS_HELP)
@run_options(fields_of("plan"))
@TRUST_MODEL_CODE
@AS_JSON
@click.pass_context
def plan(ctx: click.Context, model: str | None, as_json: bool, **options: Any) -> None:
    """List the layouts of MODEL that fit a cluster, fastest first, with their memory. Explain why others do not fit.

    --ds-config, and options such as --zero-stage, set parts of the layout. zerofit searches the other parts. Layouts
    that do not fit are listed last, with their times. Without hardware options the cluster is this machine.

    Exit code 0: a layout fits; 1: none fits; 2: bad input.
    """
    # As in `simulate`, the table is shown as soon as it is known (`on_plan`): --confirm and --write simulate after it.
    refuse_unread(ctx)
    show_mesh, methods, details = (options.pop(name) for name in ("show_mesh", "methods", "details"))
    columns = options.pop("columns") or ()
    if options["serve"]:
        serving = answer(lambda: _serve(model, options), as_json, show_serving)
        sys.exit(0 if serving.engine.fits else FINDING)
    if options["method"]:
        rollouts = answer(lambda: _rollouts(model, options), as_json, show_rollouts)
        sys.exit(0 if rollouts.best.fits else FINDING)
    if methods:
        result = answer(lambda: _compare(model, options, methods), as_json, show_methods)
    else:
        on_plan = None if as_json else partial(show, mesh=show_mesh, details=details, columns=columns)
        result = answer(lambda: _plan(model, options, on_plan), as_json, partial(show_end, details=details))
    sys.exit(0 if result.layouts else FINDING)


def refuse_unread(ctx: click.Context) -> None:
    """Show the given options that the answer does not use, and exit."""
    # Only options on the command line count. A default must not make the command fail.
    mode = next((name for name in UNREAD if ctx.params[name]), None)
    unread, problems = UNREAD[mode] if mode else ("rollout",), Problems()
    for parameter in ctx.command.params:
        if parameter.name in unread and ctx.get_parameter_source(parameter.name) == ParameterSource.COMMANDLINE:
            flag = parameter.opts[-1]
            message = f"plan --{mode} does not read {flag}" if mode else f"{flag} needs --serve or --method"
            problems.add("usage", message, f"remove {flag}", flag)
    if problems:
        fail(list(problems), BAD_INPUT, ctx.params["as_json"])


def _compare(model: str | None, options: dict[str, object], methods: tuple[Method, ...]) -> MethodComparison:
    from zerofit.app.planning.training_methods import compare_methods

    request, kinds = _read_request(model, options)
    kind = only_cluster(kinds, "--methods")
    with EventConsole() as console:
        return compare_methods(request, methods, kind, on_event=console)


def _serve(model: str | None, options: dict[str, Any]) -> ServingPlan:
    from zerofit.app.planning.serving import serve

    refuse_target(options["html"], "--html", ENDINGS)
    kind = only_cluster(clusters(**{name: options[name] for name in ("kinds", *HARDWARE)}), "--serve")
    plan = serve(model, kind, _pins(options), options["rollout"] or {})
    write_page(plan.to_dict(), options["html"])
    return plan


def _pins(options: Mapping[str, object]) -> Any:
    """Return the values that the options keep fixed."""
    from zerofit.app.planning.layout_pins import LayoutPins

    return given({name: options.get(name) for name in LayoutPins.__annotations__})


def _rollouts(model: str | None, options: dict[str, Any]) -> RolloutPlan:
    from zerofit.app.planning.rollouts import plan_rollouts

    request, kinds = _read_request(model, options)
    kind = only_cluster(kinds, "--method")
    with EventConsole() as console:
        plan = plan_rollouts(options["method"], request, kind, options["rollout"] or {}, on_event=console)
    if options["write"] and plan.best.fits:
        plan = replace(plan, written=plan.write(options["write"]))
    write_page(plan.to_dict(), options["html"])
    return plan


def _plan(model: str | None, options: dict[str, Any], on_plan: Callable[[Plan], None] | None) -> Plan:
    from zerofit.app.planning.planner import answer_request

    request, kinds = _read_request(model, options)
    with EventConsole() as console:
        plan = answer_request(request, kinds, on_event=console, on_plan=on_plan)
    # If nothing fits, there is nothing to write, and the exit code is FINDING.
    if options["write"] and plan.layouts:
        plan = replace(plan, written=plan.write(options["write"]))
    # A trace shows why a layout is slow, also of a layout that does not fit.
    if options["trace"] and (plan.layouts or plan.misfits):
        plan = replace(plan, traced=plan.trace(options["trace"]))
    write_page(plan.to_dict(), options["html"])
    return plan


def _read_request(model: str | None, options: dict[str, Any]) -> tuple[PlanningRequest, list[Cluster]]:
    """Return the request and the clusters. Raises UserError with all problems."""
    from zerofit.app.planning.corrections import MeasuredSpeed
    from zerofit.app.planning.outlook_options import read_work
    from zerofit.app.planning.output_files import TRACE_FLAG, refuse_existing
    from zerofit.app.planning.request import PlanningRequest

    # Each step runs even if another one fails, so that one answer names all wrong options.
    problems = Problems()
    names = ("profile", "image", "maximum", "minimum", "tuned", "from_trace", "top", "nvme_path", "confirm", "engines")
    arguments = {name: options[name] for name in names}
    measured = options["measured"]
    arguments["measured"] = problems.attempt(lambda: MeasuredSpeed.parse(measured)) if measured else None
    arguments["write"], arguments["trust_model_code"] = options["write"] is not None, options["trust_model_code"]
    arguments["work"] = problems.attempt(lambda: read_work({name: options[name] for name in WORK}))
    request = problems.attempt(lambda: PlanningRequest(model=model, pins=_pins(options), **arguments))
    if options["write"]:
        problems.attempt(lambda: refuse_existing(options["write"]))
    problems.attempt(lambda: refuse_target(options["html"], "--html", ENDINGS))
    problems.attempt(lambda: refuse_target(options["trace"], TRACE_FLAG))
    kinds = problems.attempt(lambda: clusters(**{name: options[name] for name in ("kinds", *HARDWARE)}))
    problems.raise_if_any()
    assert request and kinds
    return request, kinds
