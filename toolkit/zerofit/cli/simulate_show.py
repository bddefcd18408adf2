"""The printed answer of `zerofit simulate`: verdict, facts, changes that fit, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.text import Text

from zerofit.cli.console import fitting_table, labelled, out, print_facts
from zerofit.models.inputs import ImageInputs, NamedInputs, TableInputs
from zerofit.simulate.forecast.result import ALIKE, FITS, NOT, SimulatedRun, SimulatedScript, Simulation
from zerofit.spec.mesh import describe_rank
from zerofit.spec.overhead import HOST_PROCESS_BYTES, HOST_RESERVE
from zerofit.spec.units import shown_bytes

Rows = Iterator[Mapping[str, str]]
FIGURES = ("at start", "peak", "at end", "bytes", "share", "calls")  # right-aligned columns
COLORS = {FITS: "bold green", NOT: "bold red"}
# how many rows and names are shown
MAX_COLLECTIVES = 8  # in a table
KINDS = 3  # of memory at the peak in one line
NOTES = 3  # on a script
CHANGES = 5
NOT_ENOUGH = "not enough"
WORTH_SAYING = 0.05  # share of a device's or a node's memory that gets a line of its own


def show(result: Simulation, details: bool) -> None:
    """Print the verdict and its facts."""
    # `show_knobs` prints the changes that need less memory, as soon as they are simulated.
    console = out()
    verdict = Text(result.verdict.upper(), COLORS.get(result.verdict, "bold yellow"))
    console.print(Text.assemble("\n", verdict, "  ", _needs(result)))
    print_facts(console, _facts(result))
    if isinstance(result.run, SimulatedScript):
        print_facts(console, _script_facts(result.run, details))
    if result.against:
        color = "red" if result.against.exceeded else "green"
        console.print(Text(f"{result.against.because} ({result.against.baseline})", color))
    if details:
        _details(console, result)


def _needs(result: Simulation) -> str:
    """Return the words about needed and available memory."""
    # The device has room, so the run does not fit because of the host's memory.
    if result.margin_bytes >= 0 and result.verdict == NOT:
        host = f"{shown_bytes(result.host_node_bytes)} of {shown_bytes(result.host_total_bytes)}"
        return f"needs {host} of host memory on a node ({HOST_RESERVE:.0%} is reserved for the system)"
    # the bytes that nvidia-smi would likely show
    needed, available = result.smi_bytes, result.device_total_bytes
    if result.verdict == NOT:
        # The verdict is due to the upper estimate, which is available - margin. Use it for torch, but count only the
        # likely bytes outside of torch.
        needed = available - result.margin_bytes - sum(o.high_bytes - o.bytes for o in result.overheads)
    figures = shown_bytes(needed)
    if result.verdict not in COLORS:
        # torch's allocator can return cached memory, so even the likely bytes may be more than the device has.
        most = shown_bytes(available - result.margin_bytes)
        figures = f"up to {most}" if needed > available else f"{figures} to {most}"
    rest = "it may run out of memory"
    if result.verdict == NOT:
        rest = f"{shown_bytes(needed - available)} too much"
    elif result.verdict == FITS:
        rest = f"{shown_bytes(available - needed)} free"
    return f"needs {figures} of {shown_bytes(available)} on {result.device}, {rest}"


def _facts(result: Simulation) -> Iterator[tuple[str, str]]:
    place = f" ({describe_rank(result.rank, result.layout)})" if result.layout.combined else ""
    layout = str(result.layout)
    if isinstance(result.run, SimulatedScript) and not result.run.facts.engines:
        layout = result.run.facts.sharding
    ranks = f"rank {result.rank} of {result.world_size}{place}"
    yield "run", ", ".join(filter(None, (result.run.model, ranks, layout)))
    yield "", _run_settings(result.run) if isinstance(result.run, SimulatedRun) else _script_settings(result.run)
    step = f" of step {result.peak_step + 1}" if result.peak_step >= 0 else ""
    module = f", module {result.peak_at.module}" if result.peak_at.module else ""
    yield "peak", f"{shown_bytes(result.peak_bytes)} in {result.peak_phase}{step}{module} ({result.peak_at.line})"
    if result.peak_at.own and not result.peak_at.line.endswith(result.peak_at.own):
        yield "your line", result.peak_at.own
    if result.device != "cpu" and result.smi_bytes - result.peak_bytes > WORTH_SAYING * result.device_total_bytes:
        kept = f"{shown_bytes(result.reserved_bytes - result.peak_bytes)} freed but kept by torch"
        yield "not tensors", f"{kept}, {shown_bytes(result.smi_bytes - result.reserved_bytes)} outside of torch"
    largest = sorted(result.breakdown.items(), key=lambda pair: -pair[1])[:KINDS]
    yield "largest", ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in largest if size)
    for stage in result.stages:
        yield f"rank {stage.rank}", f"{shown_bytes(stage.peak_bytes)} in {stage.peak_phase}"
    if result.device != "cpu" and result.host_node_bytes > WORTH_SAYING * result.host_total_bytes:
        host = f"{shown_bytes(result.host_node_bytes)} of {shown_bytes(result.host_total_bytes)} on a node"
        yield "host memory", f"{host} (--host-memory)"
    if result.picture:
        yield "picture", str(result.picture)
    if result.trace:
        yield "trace", f"{result.trace} (opens in https://ui.perfetto.dev)"
    if result.snapshot:
        yield "snapshot", f"{result.snapshot} (opens in https://pytorch.org/memory_viz)"


def _run_settings(run: SimulatedRun) -> str:
    inputs, size = run.input, f"{run.seq_len} tokens"
    if isinstance(inputs, ImageInputs):
        size = f"{inputs.channels}x{inputs.size}x{inputs.size}"
    if isinstance(inputs, TableInputs):
        size = f"{inputs.features} features"
    if isinstance(inputs, NamedInputs):
        size = ", ".join(f"{tensor.name} {'x'.join(map(str, tensor.shape)) or 1}" for tensor in inputs.tensors)
    words = [str(run.precision), f"micro batch {run.micro_batch} of {size}"]
    words += [f"accumulation {run.gradient_accumulation_steps}"] if run.gradient_accumulation_steps > 1 else []
    words += [run.optimizer or "the JSON's optimizer"]
    kind = "selective " if run.activation_checkpointing == "selective" else ""
    words += [f"{kind}activation checkpointing"] if run.activation_checkpointing else []
    words[-1] += " kept on the host" if run.activation_offload else ""
    words += [f"loss in chunks of {run.loss_chunk}"] if run.loss_chunk else []
    words += [f"MLPs in tiles of {run.mlp_chunk}"] if run.mlp_chunk else []
    return ", ".join(words)


def _script_settings(run: SimulatedScript) -> str:
    facts = run.facts
    # a script that has released its model, or trains plain tensors, has no model at the end
    words = [f"{facts.model} of {facts.parameters:,} parameters"] if facts.parameters else []
    if facts.trained_parameters < facts.parameters:
        words.append(f"{facts.trained_parameters:,} of them trained")
    words += [facts.precision, f"micro batch {facts.micro_batch}", f"accumulation {facts.accumulation}"]
    words += [facts.optimizer] if facts.optimizer else []
    words += ["activation checkpointing"] if facts.checkpointing else []
    words += [f"batches of up to {facts.longest_seen} tokens"] if facts.longest_seen else []
    if facts.longest_allowed > facts.longest_seen:
        words[-1] += f" ({facts.allowed_by} allows {facts.longest_allowed})"
    return ", ".join(words)


def _script_facts(run: SimulatedScript, details: bool) -> Iterator[tuple[str, str]]:
    longest, routing = run.longest, run.worst_routing
    if longest:
        fits = "fits" if longest.fits else "does not fit"
        yield longest.name, f"peak {shown_bytes(longest.peak_bytes)} in {longest.peak_phase}, {fits}"
    if routing:
        fits = "fits" if routing.fits else "does not fit"
        peak = f"peak {shown_bytes(routing.peak_bytes)} in {routing.peak_phase}, {fits}"
        yield "worst routing", f"if all tokens choose the same experts: {peak}"
    for fault in run.facts.faults:
        yield "fault", f"{fault.line}: {fault.problem}" if fault.line else fault.problem
        yield "", fault.mend
    exact = "an upper bound" if any(note.bound for note in run.facts.notes) else "exact"
    lacking = ", but workspaces of some ops are not counted" if run.lacks_memory else ""
    yield "script", f"{run.facts.ended}; sizes of tensors are {exact}{lacking}"
    ranked = sorted(run.facts.notes, key=lambda note: not note.missing)  # missing memory first
    notes = ranked if details else ranked[:NOTES]
    for note in notes:
        yield "note", note.text + (f" ({note.count} times)" if note.count > 1 else "")
    if len(notes) < len(ranked):
        yield "", f"{len(ranked) - len(notes)} more notes with --details"


def _details(console: Console, result: Simulation) -> None:
    facts = [("verdict", result.because)]
    if result.device != "cpu":
        reserved = f"{shown_bytes(result.reserved_bytes)} by torch's allocator"
        # The host may issue work faster than the device does it, and then needs more memory at once.
        if result.reserved_ahead_bytes != result.reserved_bytes:
            reserved += f" (up to {shown_bytes(result.reserved_ahead_bytes)} if the host runs ahead of the device)"
        low, high = map(shown_bytes, result.smi_range_bytes)
        by_driver = f"nvidia-smi shows about {shown_bytes(result.smi_bytes)} ({low} to {high})"
        facts += [("reserved", f"{reserved}; {by_driver}")]
    host = result.host_bytes
    if sum(host.values()):
        kinds = ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in host.items() if size)
        cached = f" ({shown_bytes(result.host_kept_bytes)} of it kept for reuse)" if result.host_kept_bytes else ""
        facts += [("host memory", f"{kinds}{cached}; the process needs about {shown_bytes(HOST_PROCESS_BYTES)} more")]
    if result.nvme_bytes:
        facts += [("NVMe", shown_bytes(result.nvme_bytes))]
    # The memory of all layers is extrapolated from a few; one more number of layers checks that.
    if result.layers_simulated:
        check, *counts = result.layers_simulated
        off = f"the peak with {check} layers is off by {abs(result.extension_error):.2%}"
        facts += [("layers", f"extrapolated from {' and '.join(map(str, counts))}; {off} (--exact simulates all)")]
    console.print()
    print_facts(console, facts)
    for rows in map(list, (_phases(result), _breakdown(result), _collectives(result))):
        if rows:
            console.print()
            console.print(fitting_table(console, rows, FIGURES, tuple(rows[0]), next(iter(rows[0]))))


def _phases(result: Simulation) -> Rows:
    for row in result.phases:
        name = row.name + (f" (step {row.step + 1})" if row.step >= 0 else "")
        sizes = {"at start": row.start_bytes, "peak": row.peak_bytes, "at end": row.end_bytes}
        yield {"phase": name, **{title: shown_bytes(size) for title, size in sizes.items()}}


def _breakdown(result: Simulation) -> Rows:
    for kind, size in result.breakdown.items():
        if size:
            share = f"{size / result.peak_bytes:.1%}"
            yield {"allocated at the peak": kind, "bytes": shown_bytes(size), "share": share}


def _collectives(result: Simulation) -> Rows:
    for row in sorted(result.comm, key=lambda r: -r.bytes)[:MAX_COLLECTIVES]:
        figures = {"ranks": str(row.group_size), "in": row.phase, "calls": str(row.count)}
        yield {"collective, a step": row.op, **figures, "bytes": shown_bytes(row.bytes)}


def show_knobs(result: Simulation, details: bool) -> None:
    """Print the changes that need less memory, cheapest in speed first, and how to see more."""
    console = out()
    # Changes that need as much memory are of no use. If the run fits anyway, so are those that fit with as much.
    leaner = [row for row in result.tried if row.fits or row.reserved_bytes < result.reserved_bytes]
    fitting = [row for row in leaner if row.fits]
    if result.verdict == FITS:
        fitting = [row for row in fitting if row.reserved_bytes < result.reserved_bytes]
    lists = {"smaller with" if result.verdict == FITS else "fits with": fitting}
    if details or not fitting:
        lists[NOT_ENOUGH] = [row for row in leaner if not row.fits]
    for label, rows in lists.items():
        ranked = sorted(rows, key=lambda row: row.cost_rank)
        if not details and len(ranked) > CHANGES:
            # Of changes that are not enough, the nearest one is shown even if it costs most speed.
            leanest = min(ranked[CHANGES - 1 :], key=lambda row: row.peak_bytes)
            ranked = [*ranked[: CHANGES - 1], leanest if label == NOT_ENOUGH else ranked[CHANGES - 1]]
        width = max((len(cost(row.slowdown)) + 2 for row in ranked if row.slowdown is not None), default=0)
        facts = []
        for row in ranked:
            size = shown_bytes(row.reserved_bytes + row.outside_bytes)
            facts.append((label, f"{size:<8}  {cost(row.slowdown):<{width}}{row.change}"))
        print_facts(console, labelled(facts), hang=10 + width)
    if not details:
        how = "as a picture: --plot memory.png    " if isinstance(result.run, SimulatedRun) else ""
        # A script's change names a file that does not exist.
        if not how and any(row.config or row.file for row in fitting):
            how = "its file: --write-config FILE    "
        print_facts(console, [("details", f"--details    {how}as JSON: --json")])


def cost(slowdown: float | None) -> str:
    """Return how much slower a change makes a step, as a share of the step time, in words."""
    if slowdown is None:
        return ""
    if slowdown >= 1:
        return f"~{1 + slowdown:.2g} x the time"
    percent = round(100 * abs(slowdown))
    if abs(slowdown) < ALIKE:
        return "as fast"
    return f"~{percent}% {'slower' if slowdown > 0 else 'faster'}"
