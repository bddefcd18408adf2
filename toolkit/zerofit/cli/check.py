"""`zerofit check` and `zerofit schema`: check, fix, explain and resolve a DeepSpeed JSON."""

from __future__ import annotations

import difflib
import json
import re
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from zerofit.check.catalog import catalog
from zerofit.check.reader import READERS
from zerofit.cli.check_show import UnreadFile, github, sarif, show_findings
from zerofit.cli.console import EventConsole, answer_watched, err, out, print_facts
from zerofit.cli.options import AS_JSON, given, run_options
from zerofit.cli.report import HTML
from zerofit.cli.terminal import style
from zerofit.spec.errors import UserError
from zerofit.spec.run import fields_of, load_run
from zerofit.spec.units import counted

if TYPE_CHECKING:
    from zerofit.app.checking import CheckResult, ResolvedConfig
    from zerofit.check.explain import KeyRow
    from zerofit.check.migrate import Migrated

MIGRATE_HELP = "convert FILES of an older DeepSpeed to the installed release, and write FILE.migrated.json"
ARGS_HELP = "compare with the Trainer's arguments in a JSON, a YAML (also of axolotl or LLaMA-Factory) or a run_*.sh"
ACCELERATE_HELP = "compare with Accelerate's YAML; without FILES, check the JSON that the YAML names or implies"
CLEAN, WARNINGS, ERRORS = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The findings about one file, and the output that the flags ask for."""

    result: CheckResult
    explained: list[KeyRow] | None = None
    new_text: str | None = None  # fixed or migrated; None: not requested
    written: str | None = None  # None if nothing changed
    undecided: tuple[str, ...] = ()  # remaining errors of the new text, with their fixes
    migrated: Migrated | None = None
    resolved: ResolvedConfig | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the JSON for one file."""
        shown: dict[str, object] = self.result.to_dict()
        if self.explained is not None:
            shown["explained"] = [asdict(row) for row in self.explained]
        if self.migrated:
            shown |= {"lost": self.migrated.lost, "kept": self.migrated.kept}
        if self.new_text is not None:
            shown |= {"written": self.written, "undecided": list(self.undecided)}
        return shown | (self.resolved.to_dict() if self.resolved else {})


@dataclass(frozen=True, kw_only=True)
class CheckReports:
    """The reports of all files."""

    reports: tuple[CheckReport | UnreadFile, ...]
    several: bool

    @property
    def results(self) -> list[CheckResult | UnreadFile]:
        """The findings of each file."""
        return [report if isinstance(report, UnreadFile) else report.result for report in self.reports]

    @property
    def exit_code(self) -> int:
        """The worst exit code of all files."""
        checked = [result for result in self.results if not isinstance(result, UnreadFile)]
        if len(checked) < len(self.results) or any(result.errors for result in checked):
            return ERRORS
        return WARNINGS if any(result.findings for result in checked) else CLEAN

    def to_dict(self) -> dict[str, object]:
        """Return the object that `--json` prints."""
        files = [report.to_dict() for report in self.reports]
        return {"files": files} if self.several else files[0]


@click.command()
@click.argument("files", nargs=-1)
@click.option("--model", help="check sizes against this model, and fill them in with --resolve")
@click.option(
    "--gpu", metavar="KIND", help="the device of the run: h100-80gb, p5.48xlarge, ..., cpu, or a YAML file of your own"
)
@run_options(fields_of("check"))
@click.option("--for", "reader", type=click.Choice(READERS), help="the program that reads the file [guessed]")
@click.option("--training-args", metavar="FILE", help=ARGS_HELP)
@click.option("--accelerate-config", metavar="FILE", help=ACCELERATE_HELP)
@click.option("--strict", is_flag=True, help="exit with code 1 if there are warnings")
@click.option("--fix", is_flag=True, help="write FILE.fixed.json and print the difference")
@click.option("--migrate", is_flag=True, help=MIGRATE_HELP)
@click.option("--explain", is_flag=True, help="print which keys take effect, ignored keys and important defaults")
@click.option("--resolve", is_flag=True, help='print the plain DeepSpeed JSON of a run, every "auto" filled in')
@click.option("--all", "show_all", is_flag=True, help="show all findings, not only the first")
@HTML
@click.option("--format", "form", type=click.Choice(("text", "json", "github", "sarif")), default="text")
@AS_JSON
def check(
    files: tuple[str, ...], gpu: str | None, reader: str | None, as_json: bool, strict: bool, **options: Any
) -> None:
    """Find all faults in a DeepSpeed JSON before a run starts.

    FILES are paths, folders (every DeepSpeed JSON in them), - for standard input, or names of bundled files.
    Exit code 0: no errors, 1: warnings (with --strict), 2: errors.
    """
    from zerofit.app.checking import check as run_check
    from zerofit.app.checking import find_files

    flags = given({name: options[name] for name in ("model", *fields_of("check"))})
    companions = {name: options[name] for name in ("training_args", "accelerate_config") if options[name]}
    if not files and not companions:
        raise click.UsageError("name a FILE, or pass --training-args or --accelerate-config")
    # Without FILES the only "file" is None: the arguments of the other program name or imply the JSON.
    outputs = {name: options[name] for name in ("fix", "migrate", "explain", "resolve")}
    # --resolve prints what zerofit would pass on, or what another program would, if its arguments are given.
    reader = reader or ("zerofit" if options["resolve"] and not companions else None)
    # `--json` is the form that all commands have; `--format json` is the same.
    form = "json" if as_json else options["form"]

    def work(console: EventConsole) -> CheckReports:
        names, run = find_files(files) or [None], load_run(None, flags)
        # A folder has several files, even if only one is a DeepSpeed JSON.
        several = len(names) > 1 or names != list(files or [None])
        if several and options["resolve"]:
            raise click.UsageError("--resolve needs exactly one FILE")

        def check_file(name: str | None) -> CheckReport | UnreadFile:
            try:
                return _report(run_check(name, run, gpu, reader=reader, on_event=console, **companions), **outputs)
            except UserError as error:
                if not several and form in ("text", "json"):
                    raise
                # One unreadable file does not hide the findings about the other files.
                problem = error.problems[0]
                line = re.search(r":(\d+):\d+$", problem.where or "")
                return UnreadFile(file=name or "-", problem=problem, line=int(line.group(1)) if line else 1)

        return CheckReports(reports=tuple(map(check_file, names)), several=several)

    def show(reports: CheckReports) -> None:
        if form != "text":
            print((github if form == "github" else sarif)(reports.results))
            return
        for report in reports.reports:
            _show(report, options["show_all"], reports.several)
        if reports.several:
            faulty = [result for result in reports.results if isinstance(result, UnreadFile) or result.errors]
            total = f"{len(reports.results)} files, {len(faulty)} with errors"
            click.echo(f"{total}; checked against DeepSpeed {catalog().version}", err=True)

    # Warnings alone do not fail a pipeline of CI, unless it asks for that.
    code = answer_watched(work, form == "json", show, html=options["html"]).exit_code
    sys.exit(CLEAN if code == WARNINGS and not strict else code)


@click.command()
def schema() -> None:
    """Print a JSON Schema of the installed DeepSpeed's configuration, for completion and help in an editor."""
    from zerofit.check.reader import schema as make

    print(json.dumps(make(), indent=2))


def _report(result: CheckResult, *, fix: bool, migrate: bool, explain: bool, resolve: bool) -> CheckReport:
    """Write the file that --fix or --migrate asks for, and return the report about a file."""
    migrated = result.migrated() if migrate else None
    new_text = migrated.text if migrated else result.fixed() if fix else None
    written = result.write(new_text, "migrated" if migrated else "fixed") if new_text is not None else None
    return CheckReport(
        result=result,
        explained=result.explain() if explain else None,
        new_text=new_text,
        undecided=() if new_text is None else tuple(f"{f.message}: {f.fix}" for f in result.errors_of(new_text)),
        written=str(written) if written else None,
        migrated=migrated,
        resolved=result.resolve() if resolve else None,
    )


def _show(report: CheckReport | UnreadFile, show_all: bool, several: bool) -> None:
    if isinstance(report, UnreadFile):
        click.echo(f"{report.file}: {style('error', fg='red')}: {report.problem.message}")
        return
    result = report.result
    if several and not (result.findings or report.new_text or report.explained):
        return
    # Standard output has only the findings, which editors read. The totals go to standard error.
    total = f"{counted(len(result.errors), 'error')}, {counted(len(result.warnings), 'warning')}"
    total = total if result.findings else "nothing wrong"
    facts = [f"data parallel ranks that train_batch_size allows: {result.allowed_ranks}"] * bool(result.allowed_ranks)
    facts += [*result.reader.sentences(), *([] if several else [f"checked against DeepSpeed {catalog().version}"])]
    if result.findings:
        print_facts(err(), [("", f"{result.file}: {total}")], indent=0, hang=4)
        print_facts(err(), [("", fact) for fact in facts], indent=4)
    else:
        print_facts(err(), [("", "; ".join([f"{result.file}: {total}", *facts]))], indent=0, hang=4)
    # With the resolved JSON on standard output, findings go to standard error. So the output can be piped to a file.
    show_findings(result, show_all, on_stderr=report.resolved is not None)
    if report.resolved:
        print(json.dumps(report.resolved.config, indent=2))
    if report.explained is not None:
        _show_explained(report)
    for line in report.migrated.lost if report.migrated else ():
        click.echo(f"{style('lost', fg='red')}: {line}", err=True)
    for line in report.migrated.kept if report.migrated else ():
        click.echo(f"{style('kept', fg='green')}: {line}", err=True)
    if report.written:
        _show_difference(report)
        if not report.undecided:
            click.echo("the new file has no errors", err=True)
    elif report.new_text is not None:
        click.echo("nothing to change" if result.errors or report.migrated else "nothing to fix", err=True)
    for line in report.undecided:
        click.echo(f"{style('for you to decide', fg='yellow')}: {line}", err=True)


def _show_explained(report: CheckReport) -> None:
    """Print what each key does."""
    from zerofit.check.explain import shown

    # Standard output gets the resolved JSON, which programs read.
    console = err() if report.resolved else out()
    for row in report.resolved.reasons if report.resolved else ():
        print_facts(console, [("", f"{row['path']} = {shown(row['value'])}")], indent=0)
        print_facts(console, [("", row["why"])], indent=4)
    for row in report.explained or ():
        print_facts(console, [("", f"{row.path} = {shown(row.value)}  ({row.status})")], indent=0, hang=4)
        print_facts(console, [("", row.text)] if row.text else [], indent=4)


def _show_difference(report: CheckReport) -> None:
    old, new = (text.splitlines(keepends=True) for text in (report.result.document.text, report.new_text or ""))
    for line in difflib.unified_diff(old, new, report.result.file, report.written or ""):
        color = {"+": "green", "-": "red", "@": "cyan"}.get(line[0])
        click.echo(style(line.rstrip("\n"), fg=color))
    click.echo(f"written: {report.written}", err=True)
