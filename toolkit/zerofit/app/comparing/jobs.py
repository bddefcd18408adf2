"""Check a run and make the job of a comparison. Check whether a strategy's states fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from zerofit.app.job.resolve import find_model, open_model
from zerofit.app.training.free_memory import memory_here
from zerofit.compare.job import WARM, CompareJob, Strategy
from zerofit.launch.host import this_machine
from zerofit.launch.hostfile import read_hostfile
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.model_facts import Task, gives_loss, has_head
from zerofit.spec.overhead import CPU_LIBRARY_BYTES, CPU_PROCESS_LOW_BYTES
from zerofit.spec.run import Run, RunRequest
from zerofit.spec.units import shown_bytes

COMPARE_SEQ_LEN = 256  # shorter than for training, since every strategy trains the model in one command
# fields of a run that comparisons use
COMMON = {
    *("model", "model_args", "data", "data_root", "image_size", "seq_len", "tokenizer"),
    *("seed", "lr", "eval_samples"),
}
STEPPED = ("ranks", "global_batch", "steps")
STATE_BYTES = 12  # per parameter: weight, gradient and momentum in fp32


# A comparison trains with loops of its own (`compare`), not with the trainers of `zerofit train`. So it uses few fields
# of a run, and refuses the others.
class ComparisonSetup:
    """The input of a comparison: the user's run, the hosts, and the problems found so far."""

    def __init__(self, run: Run | RunRequest, hostfile: Path | str | None, on_event: OnEvent | None):
        """Read the hostfile, if there is one. Raises UserError."""
        self.request, self.report, self.problems = RunRequest.of(run), Reporter(on_event), Problems()
        self.hosts = [(host.name, host.slots) for host in read_hostfile(Path(hostfile))] if hostfile else []
        self.parameters = self.samples = 0  # facts of the model and of its training data; set by `resolve`

    def epochs(self, default: int) -> int:
        """Return the epochs of the run. Add a problem if they are not an integer."""
        epochs = self.request.run.epochs or default
        if epochs != int(epochs):
            message, where = f"epochs: {epochs} is not an integer", self.request.place("epochs")
            self.problems.add("bad-value", message, "use 1 or more", where)
        return int(epochs)

    def resolve(
        self, fields: set[str], *, batch_option: str = "--global-batch", has_accuracy: bool = False, **settings: object
    ) -> CompareJob:
        """Return the job of the comparison. Open the data once.

        `fields`: fields of the run that only this comparison uses. `settings`: further values for the job.
        `batch_option`: the option that sets the batch. Raises UserError with all problems so far.
        """
        request, problems = self.request, self.problems
        job = self._job(fields, settings)
        self._check_size(job, batch_option)
        _check_paces(job, problems)
        # The data is opened only for a run without other problems, since this can take minutes.
        source_and_task = problems.attempt(lambda: find_model(request))
        if request.run.partial:
            message = "comparisons do not support adapters or frozen weights"
            problems.add("conflict", message, "remove --lora, --train and --freeze", str(request.run.model))
        problems.raise_if_any()
        assert source_and_task
        source, task = source_and_task
        _refuse_task(request.run.model, task, has_accuracy)
        opened = open_model(request, source, task, usual_seq_len=COMPARE_SEQ_LEN, report=self.report)
        assert opened.data
        self.parameters, self.samples = opened.facts.parameters, len(opened.data.train)
        if self.samples < job.global_batch:
            samples = f"{self.samples} training samples"
            message = f"{opened.data.name} has {samples}, less than one batch of {job.global_batch}"
            problems.add("batch-size", message, "use a smaller batch", batch_option)
        problems.raise_if_any()
        return replace(job, data=opened.run.data, seq_len=opened.run.seq_len, tokenizer=opened.run.tokenizer)

    def _job(self, fields: set[str], settings: Mapping[str, object]) -> CompareJob:
        run, request, machine = self.request.run, self.request, this_machine()
        for name in sorted(set(request.places) - COMMON - fields - {"output"}):
            self.problems.add("conflict", f"{name} is not supported in comparisons", "remove it", request.place(name))
        names = COMMON | fields.intersection(STEPPED)
        values = {name: getattr(run, name) for name in names if getattr(run, name) is not None}
        values |= {"data_root": str(run.data_root)} if run.data_root else {}
        slots = sum(count for _, count in self.hosts)
        defaults = {"strategy": "", "accelerator": machine.accelerator, "ranks": slots or machine.devices}
        # The run's own values win over the defaults of this machine, and the comparison's settings over both.
        return CompareJob(hosts=self.hosts, **{**defaults, **values, **settings})

    def _check_size(self, job: CompareJob, batch_option: str) -> None:
        problems, machine, slots = self.problems, this_machine(), sum(count for _, count in self.hosts)
        if slots and job.ranks > slots:
            problems.add("ranks", f"{job.ranks} ranks, but {slots} slots in the hostfile", f"use {slots}", "--ranks")
        if job.steps <= WARM:
            message = f"{job.steps} steps are too few: the first {WARM} are not timed"
            problems.add("bad-value", message, f"use {WARM + 1} or more", self.request.place("steps"))
        # Strategies must compute the same sums, so every rank gets equally many samples.
        if job.global_batch % job.ranks:
            below = job.global_batch // job.ranks * job.ranks
            hint = f"use {batch_option} {below or job.ranks} or {below + job.ranks}"
            message = f"{batch_option} {job.global_batch} cannot be split evenly over {job.ranks} ranks"
            problems.add("batch-size", message, hint, batch_option)
        if machine.accelerator == "cuda" and not slots and job.ranks > machine.devices:
            problems.add("ranks", f"{job.ranks} ranks, but {machine.devices} GPUs", f"use {machine.devices}", "--ranks")

    def check_counts(self, job: CompareJob) -> None:
        """Raise UserError if a tried number of ranks (see `rank_counts`) does not divide the batch."""
        for count in rank_counts(job.ranks):
            if job.global_batch % count:
                message = f"--global-batch {job.global_batch} cannot be split evenly over {count} ranks"
                hint = f"use a multiple of {count} and of {job.ranks}"
                self.problems.add("batch-size", message, hint, "--global-batch")
        self.problems.raise_if_any()


def rank_counts(most: int) -> list[int]:
    """Return the powers of two up to `most`, and `most` itself."""
    return sorted({2**n for n in range(most.bit_length()) if 2**n <= most} | {most})


def _check_paces(job: CompareJob, problems: Problems) -> None:
    for rank, times in job.slow.items():
        if not 0 <= int(rank) < job.ranks:
            message, hint = f"--slow {rank}={times:g}: the run has {job.ranks} ranks", f"use ranks 0 to {job.ranks - 1}"
            problems.add("ranks", message, hint, "--slow")
        if not 1 <= times <= 1000:
            message = f"--slow {rank}={times:g}: not a valid factor for step times"
            problems.add("bad-value", message, "use 1 to 1000", "--slow")
    if not 0 <= job.straggle <= 1:
        problems.add("bad-value", f"--straggle {job.straggle:g} is not a probability", "use 0 to 1", "--straggle")


def _refuse_task(model: str, task: Task, has_accuracy: bool) -> None:
    if gives_loss(task):
        message = f"{model} ({task}) computes its own loss; comparisons need logits"
        hint = "use a classifier or a language model; `zerofit tune` compares layouts of this model"
    elif has_head(task):
        message = f"{model} ({task}) trains on padded texts, which comparisons do not support"
        hint = "leave --task out, or use a language model"
    elif has_accuracy and task == "gan":
        message, hint = f"{model} has no accuracy", "use a classifier or a language model"
    else:
        return
    raise UserError(Problem(kind="model-task", message=message, hint=hint, where="MODEL"))


def shortage_of_states(strategy: Strategy, job: CompareJob, parameters: int, folder: Path) -> str | None:
    """Return why the model states of a strategy cannot fit on this machine; None if it may start.

    `parameters`: their number in the model. `folder`: the comparison's. Activations and buffers are not counted.
    """
    if job.hosts:  # their memory is unknown
        return None
    ranks = 1 if strategy.one else job.ranks
    memory, state = memory_here(range(ranks), folder), STATE_BYTES * parameters
    if job.accelerator == "cuda":
        needed, free = state if strategy.replicas else state // ranks, memory.gpu_bytes
        place, processes_words = f"on each of {ranks} GPUs", ""
    else:
        processes = strategy.processes(job.ranks)
        processes_bytes = CPU_PROCESS_LOW_BYTES * processes + CPU_LIBRARY_BYTES
        needed = processes_bytes + state * (processes if strategy.replicas else 1)
        free, place = memory.host_bytes, memory.place
        processes_words = f", including {shown_bytes(processes_bytes)} for {processes} processes"
    if free is None or needed <= free:
        return None
    words = f"weights, gradients and momentum need at least {shown_bytes(needed)}{processes_words}"
    return f"does not fit: {words}; {shown_bytes(free)} free {place} (--anyway starts it anyway)"
