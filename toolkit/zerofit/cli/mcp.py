"""`zerofit mcp`: commands as tools of the Model Context Protocol, for coding agents."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import anyio.from_thread
import anyio.to_thread
import click
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

import zerofit as zf
from zerofit.cli.answer import Result, problems_of
from zerofit.models.names import model_table
from zerofit.spec.errors import Problems
from zerofit.spec.events import Event, OnEvent

if TYPE_CHECKING:
    from zerofit.simulate.forecast.result import Simulation

# Agents read these texts before they call a tool, so units and the next step are named here.
INSTRUCTIONS = """Forecasts of GPU memory and step time for PyTorch and DeepSpeed training, and checks of DeepSpeed
JSONs. No GPU is needed. Sizes are bytes, times seconds. Read `fits` first. If it is false, take the entry of `knobs`
that fits and has the lowest `cost_rank`. If none fits, call `plan` with the same model and GPUs."""
RUN = """Keys of run.yaml. The usual ones: micro_batch, seq_len, precision (bf16, fp16, fp32), ds_config (zero0 to
zero3, zero2_offload, zero3_offload, or a file), activation_checkpointing, gradient_accumulation_steps, optimizer, lora
(rank), quantize (nf4), tensor_parallel, pipeline, sequence_parallel, loss_chunk."""
LAYOUT = """Fixed values of the layout: global_batch, seq_len, precision, micro_batch, zero_stage, offload,
activation_checkpointing, tensor_parallel, pipeline, sequence_parallel, lora, tokens, price. The rest is searched."""

Model = Annotated[str, Field(description="a name (see `models`), a config.json, a folder, or hub:ORG/NAME")]
Gpu = Annotated[str, Field(description="h100-80gb, a100-40gb, l4, ..., or a cloud instance type such as p5.48xlarge")]
Gpus = Annotated[int, Field(description="GPUs of a node")]
Configuration = Annotated[str | dict[str, Any], Field(description="a file, or the configuration itself")]

ONE_CALL = anyio.CapacityLimiter(1)  # two simulations at a time would need twice the host memory
READING = ToolAnnotations(read_only_hint=True)
app = MCPServer("zerofit", version=version("zerofit"), instructions=INSTRUCTIONS, log_level="WARNING")


@click.command()
def mcp() -> None:
    """Start an MCP server on standard input and output: agents can call simulate, plan, check, explain and models.

    The agent starts it: add the command `zerofit mcp` to the agent's MCP servers.
    """
    app.run("stdio")


@app.tool(annotations=READING)
async def simulate(
    ctx: Context,
    model: Model,
    gpu: Gpu,
    gpus: Gpus = 1,
    nodes: int = 1,
    run: Annotated[dict[str, object] | None, Field(description=RUN)] = None,
) -> dict[str, object]:
    """Forecast the memory of a zerofit training run to the byte, and simulate changes if it does not fit."""

    def work(report: OnEvent) -> Simulation:
        problems = Problems()
        cluster = problems.attempt(lambda: zf.Cluster(gpu, gpus=gpus, nodes=nodes))
        training = problems.attempt(lambda: zf.Run(**{"model": model, **(run or {})}))
        problems.raise_if_any()
        assert training
        return _with_knobs(zf.simulate(training, cluster, on_event=report), report)

    return await _answered(ctx, work)


# This tool runs code of the user, so it is not marked as read-only.
@app.tool()
async def simulate_script(
    ctx: Context,
    command: Annotated[list[str], Field(description='the start command: ["torchrun", "train.py", "--epochs", "3"]')],
    gpu: Gpu,
    gpus: Gpus = 1,
    nodes: int = 1,
) -> dict[str, object]:
    """Run a training script on fake tensors for two steps, forecast its memory, and simulate changes if needed.

    It executes the unmodified script in the server's working directory. HF Trainer, Accelerate, TRL,
    DeepSpeed and plain torch work.
    """

    def work(report: OnEvent) -> Simulation:
        cluster = zf.Cluster(gpu, gpus=gpus, nodes=nodes)
        return _with_knobs(zf.simulate_script(command, cluster, on_event=report), report)

    return await _answered(ctx, work)


@app.tool(annotations=READING)
async def plan(
    ctx: Context,
    model: Model,
    gpu: Gpu,
    gpus: Gpus = 1,
    nodes: int = 1,
    layout: Annotated[dict[str, Any] | None, Field(description=LAYOUT)] = None,
    top: Annotated[int, Field(description="layouts to return")] = 3,
) -> dict[str, Any]:
    """Rank the layouts of a model that fit, with memory and step time, best first."""

    def work(report: OnEvent) -> zf.Plan:
        cluster = zf.Cluster(gpu, gpus=gpus, nodes=nodes)
        options: Any = layout or {}
        return zf.plan(model, cluster, top=top, on_event=report, **options)

    return await _answered(ctx, work)


@app.tool(annotations=READING)
async def check(
    ctx: Context,
    ds_config: Configuration,
    reader: Annotated[str | None, Field(description="deepspeed, trainer, accelerate, lightning or zerofit")] = None,
    training_args: Annotated[str | dict[str, object] | None, Field(description="the Trainer's arguments")] = None,
) -> dict[str, Any]:
    """Find faults in a DeepSpeed JSON: unknown keys, wrong values, combinations that DeepSpeed ignores."""
    return await _answered(
        ctx, lambda report: zf.check(ds_config, reader=reader, training_args=training_args, on_event=report)
    )


@app.tool(annotations=READING)
async def explain(
    ctx: Context,
    what: Annotated[str, Field(description="a log, a memory snapshot (.pickle) or a run folder of zerofit")],
) -> dict[str, Any]:
    """Explain an out-of-memory error: its cause, the line that requested memory, the memory in use, what to change.

    `cause` is "unknown" if the evidence does not show the cause; `run_next` is then the command or line that shows it.
    """
    return await _answered(ctx, lambda report: zf.explain(what, on_event=report))


@app.tool(annotations=READING)
async def models(
    ctx: Context, words: Annotated[list[str] | None, Field(description='["qwen3", "8b"]')] = None
) -> dict[str, object]:
    """List the models known by name, with parameter counts."""
    return await _answered(ctx, lambda report: {"models": model_table(tuple(words or ()))})


def _with_knobs(result: Simulation, report: OnEvent) -> Simulation:
    if not result.fits:
        result.knobs(report)
    return result


async def _answered(ctx: Context, work: Callable[[OnEvent], Result | Mapping[str, object]]) -> dict[str, object]:
    """Do the work in a thread, report its progress, and return the JSON of its result.

    Raises ToolError with the problems that `--json` prints.
    """
    reports = itertools.count(1)

    # Called in the thread of the work; the protocol's messages are sent by the event loop.
    def report(event: Event) -> None:
        if event.text:
            anyio.from_thread.run(ctx.report_progress, next(reports), None, event.text)

    # The work blocks for minutes. In a thread, the server can still answer pings and send progress.
    try:
        result = await anyio.to_thread.run_sync(work, report, limiter=ONE_CALL)
    except Exception as error:
        problems = problems_of(error)
        if not problems:
            raise  # a bug keeps its traceback
        raise ToolError(json.dumps({"errors": [problem.as_dict() for problem in problems]})) from error
    return dict(result if isinstance(result, Mapping) else result.to_dict())
