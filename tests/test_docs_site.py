"""The site's pages: each has its place in the navigation, and messages that pages quote are those of the code."""

from __future__ import annotations

import re
from functools import cache

import pytest

from docs import site
from tests.check.test_corpus import codes
from tests.test_docs_zh import ROOT

NAV = re.compile(r"([\w/-]+\.md)$", re.MULTILINE)
QUOTED = re.compile(r"^### `([^`]+)`\n\n(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
OF_OTHERS = {"zerofit: command not found"}  # the shell's


def test_every_page_has_its_place():
    named = NAV.findall((ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    there = {place.as_posix() for place in site.sources().values()} | set(site.GENERATED)
    assert len(named) == len(set(named))
    assert set(named) - there == set()
    pages = {name for name in there if not name.startswith(("project/", "laboratory/", "benchmarks/", "examples/"))}
    assert pages - set(named) == {"ds_configs/README.md"}


def test_the_start_page_shows_the_answer_of_the_readme():
    screen = re.search(r"^```console\n.*?^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert screen and screen[0] in (ROOT / "docs" / "index.md").read_text()


def test_links_out_of_docs_lead_into_the_site_or_the_repository():
    places = site.sources()
    page = ROOT / "docs" / "how-to" / "deepspeed-json.md"
    there = {link: site._target(link, page, places[page], places) for link in ("../checks.md", "../../launch.sh")}
    assert there == {"../checks.md": "../checks.md", "../../launch.sh": f"{site.REPOSITORY}launch.sh"}


@cache
def code() -> str:
    return "\n".join(path.read_text() for room in ("toolkit", "models") for path in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize(("message", "text"), QUOTED.findall((ROOT / "docs" / "troubleshooting.md").read_text()))
def test_messages_are_those_of_the_code(message: str, text: str):
    if message in OF_OTHERS:
        return
    parts = [part for part in re.split(site.GAP, message) if re.search(r"\w{2}", part)]
    assert parts and [part for part in parts if part not in code()] == []
    kinds = re.findall(r"Kind: `([a-z-]+)`", text)
    assert [kind for kind in kinds if f'"{kind}"' not in code()] == []


def test_messages_are_found_in_the_code(tmp_path, monkeypatch):
    source = tmp_path / "room.py"
    source.write_text(
        "def f(n):\n    message = f'{n} ranks ' + 'hang'\n    return Problem(kind='hang', message=message)\n"
    )
    monkeypatch.setattr(site, "_sources_of", lambda folder: [source])
    assert site._calls(".", "kind", ("Problem",))["hang"][0]["message"] == f"{site.GAP} ranks hang"


def test_the_site_loads_no_fonts_from_a_network():
    assert "\n  font: false\n" in (ROOT / "mkdocs.yml").read_text()


def test_every_finding_has_a_text():
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.*?) \| .*\|$", site.checks_page(), re.MULTILINE)
    assert codes() - {code for code, _ in rows} == set()
    assert [code for code, text in rows if not re.search(r"\w", text)] == []
