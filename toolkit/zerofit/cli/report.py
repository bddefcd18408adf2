"""`zerofit report`, and `--html` of other commands: write one page that needs no network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from zerofit.cli.answer import answer
from zerofit.cli.options import AS_JSON, PATH
from zerofit.spec.errors import Problems
from zerofit.spec.files import refuse_target

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
        problems.attempt(lambda: refuse_target(out, "--out", ENDINGS))
        contents = problems.attempt(lambda: read_sources(sources)) or {}
        problems.raise_if_any()
        make_page(contents).write(out, "--out")
        listed = [{"kind": KINDS[type(content)][0], "title": content.title} for content in contents.values()]
        return {"page": str(out), "sources": listed}

    answer(work, as_json, lambda written: click.echo(written["page"]))


def write_page(result: Mapping[str, object], path: Path | None) -> None:
    """Write the page about `result`, the object that --json prints, if --html was given."""
    if path:
        from zerofit.report.answers import results_of
        from zerofit.report.report import make_page, with_names

        contents = [(content.title, content) for content in results_of(result)]
        make_page(with_names(contents)).write(path, "--html")
