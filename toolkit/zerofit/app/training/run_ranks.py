"""Start the ranks of a job on their hosts, supervise them, and return their result."""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

from zerofit.app.training.result import outcome
from zerofit.config.batch import brief
from zerofit.launch.host import RUN_ID, end_all
from zerofit.launch.local import LaunchSite, started
from zerofit.spec.events import Event, Reporter, stages_event
from zerofit.spec.files import JsonlTail
from zerofit.spec.run_folder import Job, RunFolder
from zerofit.watch.launch_spec import LaunchSpec, as_argument
from zerofit.watch.supervise import Watch, supervise

REPEAT_S = 15.0  # a long phase is reported again at this interval


class RunEvents:
    """Report the events that the ranks write, each once."""

    def __init__(self, folder: RunFolder, report: Reporter):
        self._report = report
        self._metrics = JsonlTail(folder.metrics, on_bad_line=report.warning)
        self._events = JsonlTail(folder.events, on_bad_line=report.warning)
        self._stop_request, self._stopping = folder.stop_request, False
        self._ranks, self._steps = "", None
        self._phase, self._since, self._told = "", time.monotonic(), time.monotonic()

    def look(self, ranks: str) -> None:
        """Report new events. `ranks`: the ranks' state, or "" if it is not worth reporting."""
        # Only a change is an event.
        if ranks != self._ranks:
            self._ranks = ranks
            self._report.on_event(Event(kind="ranks", text=ranks))
        for record in self._metrics.read():
            self._tell(metrics_event(record, self._steps))
        for line in self._events.read():
            event = _event_of(line)
            if event is not None:
                self._tell(event)
        # A phase without news is repeated with its duration, so that a user sees that the run is alive.
        now = time.monotonic()
        if self._phase and now - self._told > REPEAT_S:
            self._told = now
            self._report.on_event(Event(kind="phase", text=f"{self._phase} ({now - self._since:.0f} s)"))
        if not self._stopping and self._stop_request.exists():
            self._stopping = True
            self.phase("asked the ranks to save and stop; a second request stops them at once")

    def phase(self, text: str) -> None:
        """Report the current phase."""
        self._tell(Event(kind="phase", text=text))

    def _tell(self, event: Event) -> None:
        if event.kind == "training":
            self._steps = event.data.get("steps")
        if event.kind in ("phase", "training", "evaluated"):
            self._phase = event.text if event.kind == "phase" else ""
            self._since = self._told = time.monotonic()
        self._report.on_event(event)


def metrics_event(record: dict[str, Any], steps: int | None) -> Event:
    """Return the event for a record in metrics.jsonl. `steps`: total steps of the run, if known."""
    rate = "samples_per_s" if record.get("tokens_per_s") is None else "tokens_per_s"
    shapes = {"loss": "loss {:.4f}", "lr": "lr {:.2e}", rate: f"{{:,.0f}} {rate.removesuffix('_per_s')}/s"}
    shapes["mfu"] = "MFU {:.1%}"
    parts = [shape.format(record[name]) for name, shape in shapes.items() if record.get(name) is not None]
    device_bytes = record.get("reserved_bytes") or record.get("memory_bytes", 0)
    memories = {"memory": (device_bytes, record.get("forecast_bytes"))}
    if record.get("forecast_host_bytes"):
        memories["host"] = record["host_bytes"], record["forecast_host_bytes"]
    for name, (size, forecast) in memories.items():
        of_forecast = f" of {forecast / 2**30:.2f} GiB forecast" if forecast else " GiB"
        parts.append(f"{name} {size / 2**30:.2f}{of_forecast}")
    step, text = record.get("step", 0), "  ".join(parts)
    return Event(kind="metrics", text=f"step {step}: {text}", done=step, total=steps, unit="steps", data=record)


def _event_of(line: dict[str, Any]) -> Event | None:
    data = {key: value for key, value in line.items() if key not in ("event", "time_s", "text")}
    kind, text = line.get("event"), line.get("text", "")
    step = f"step {data.get('step')}"
    if kind in ("phase", "note", "warning"):
        return Event(kind=kind, text=text)
    if kind == "stages":
        return stages_event(data["stages"])
    if kind == "training":
        return Event(kind="training", text="training", data=data)
    if kind == "saved":
        return Event(kind="saved", text=f"{step}: checkpoint saved in {data.get('save_s', 0.0):.1f} s", data=data)
    if kind == "save-failed":
        return Event(kind="warning", text=f"{step}: {text}", data=data)
    if kind == "eval":
        figures = ", ".join(f"{name} {value:.4g}" for name, value in data.items() if name != "step")
        return Event(kind="evaluated", text=f"{step}: validation {figures}", data=data)
    return None


def run_ranks(
    folder: RunFolder,
    site: LaunchSite,
    watch: Watch,
    report: Reporter,
    *,
    attempt: int = 1,
    handle_signals: bool = False,
) -> dict[str, Any]:
    """Start the ranks, report their events, and return what rank 0 wrote into result.json.

    `handle_signals`: the first SIGTERM, SIGHUP or SIGUSR1 asks the ranks to save and stop (main thread only). Raises
    RunFailed with the cause of a failure, DoesNotFit and Stopped.
    """
    spec = LaunchSpec(
        folder=str(folder.path),
        token=secrets.token_hex(16),
        run_id=secrets.token_hex(8),
        attempt=attempt,
        hosts=site.hosts,
        watch={host: (address, watch.port) for host, address in site.addresses.items()},
        master=site.master,
        accelerator=site.accelerator,
        coming_s=site.coming_s,
        timeout_s=site.timeout_s,
        environment=dict(site.forwarded),
        interfaces=dict(site.interfaces),
        cwd=os.getcwd(),
    )
    # The guards read their instructions from this file, so that no text of the user passes through a shell.
    spec.write(folder.launch_spec)
    watch.expect(spec)
    events = RunEvents(folder, report)
    events.phase(f"starting the ranks: {brief(Job.read(folder).batch)}")
    env = {**site.env(spec.run_id), RUN_ID: spec.run_id}
    ranks = started(folder, site.argv(as_argument(folder.launch_spec)), env, site.cwd, handle_signals=handle_signals)
    try:
        ended = supervise(ranks, watch, folder, lambda: events.look(watch.summary()))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(str(folder.path)) from None
    finally:
        # First the file: with --no-ssh, a node that looks late would start the ranks of this ended start.
        folder.launch_spec.unlink(missing_ok=True)
        end_all(spec.run_id)  # pdsh starts each ssh in a separate session
        report.note(*(site.sweep(spec.run_id) if site.sweep else ()))
    seen = ended.verdict.problem if ended.verdict else None
    return outcome(folder, ended.code, site.again, seen, ended.failures)
