"""`zerofit report`, and `--html` of other commands: write one page that needs no network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from zerofit.cli.answer import answer
from zerofit.cli.options import AS_JSON, PATH
from zerofit.spec.errors import Problems

HTML = click.option("--html", type=PATH, metavar="FILE", help="also write the answer as a page")
# A browser decides by the ending whether a local file is a page.
ENDINGS = (".html", ".htm")


@click.command()
@click.argument("sources", metavar="RUN | FILE.json...", nargs=-1, required=True, type=PATH)
@click.option("--out", type=PATH, default="report.html", show_default=True, help="page to write")
@AS_JSON
def report(sources: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Write one page about run folders and about saved --json output of plan, tune, simulate, explain and check.

    Several results are shown side by side, with the settings that differ. The page needs no network.
    """
    from zerofit.report.report import KINDS, make_page, read_sources

    def work() -> dict[str, object]:
        # Name all problems at once: those of the page and those of the sources.
        problems = Problems()
        check_page(out, "--out", problems)
        contents = problems.attempt(lambda: read_sources(sources)) or {}
        problems.raise_if_any()
        make_page(contents).write(out, "--out")
        listed = [{"kind": KINDS[type(content)][0], "title": content.title} for content in contents.values()]
        return {"page": str(out), "sources": listed}

    answer(work, as_json, lambda written: click.echo(written["page"]))


def check_page(path: Path, option: str, problems: Problems) -> None:
    """Add a problem if no page can be written to `path`, which `option` names."""
    if path.suffix.lower() not in ENDINGS:
        problems.add("bad-value", f"{path} is not the name of an HTML file", "use a name that ends in .html", option)
    if path.is_dir() or not path.absolute().parent.is_dir():
        problems.add("bad-value", f"{path} cannot be written", "use a file in an existing folder", option)


def refuse_page(path: Path | None) -> None:
    """Raise UserError before any work if no page can be written to the file of --html."""
    problems = Problems()
    if path:
        check_page(path, "--html", problems)
    problems.raise_if_any()


def write_page(result: Mapping[str, object], path: Path | None) -> None:
    """Write the page about `result`, the object that --json prints, if --html was given."""
    if path:
        from zerofit.report.answers import results_of
        from zerofit.report.report import make_page, with_names

        contents = [(content.title, content) for content in results_of(result)]
        make_page(with_names(contents)).write(path, "--html")
