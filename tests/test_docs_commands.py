"""Every `zerofit ...` of the pages is one that click takes; nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from tests.test_docs_zh import FENCE, ROOT, broken_links, commands, fault
from zerofit.cli.main import main

TREES = (ROOT / "docs", ROOT / "ds_configs", ROOT / "benchmarks", ROOT / "examples")
PAGES = sorted([*ROOT.glob("*.md"), *(page for tree in TREES for page in tree.rglob("*.md"))])
PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which has what was called otherwise once
OTHERS = {  # options of other programs, and of scripts in benchmarks/
    *(
        "--bf16",
        "--case",
        "--check",
        "--config_file",
        "--configs",
        "--count",
        "--cpu",
        "--cpus-per-task",
        "--delay",
        "--fp16",
        "--sample",
    ),
    *("--from-env-file", "--gpus-per-node", "--gpus-per-task", "--gradient_checkpointing", "--kinds", "--limit"),
    *("--limits", "--log", "--map-by", "--mpirun_hostfile", "--multi_gpu", "--nproc_per_node", "--ntasks-per-node"),
    *("--num_gpus", "--offload_optimizer_device", "--only", "--open-mode", "--per_device_train_batch_size"),
    *("--plan-only", "--rehearse", "--requeue", "--safe_serialization", "--signal", "--stages", "--use_deepspeed"),
    *("--zero_stage",),
}
MISTYPED = {"trian lenet"}  # docs/screens.md shows what is answered
pages = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def options(command: click.Command = main) -> Iterator[str]:
    """Yield the options of a command and of all below it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found
            yield from options(found)


@cache
def known() -> frozenset[str]:
    return frozenset(options()) | OTHERS | {"--help"}


def named_options(text: str) -> set[str]:
    """Return the long options that stand in a page's text, outside of its code blocks."""
    prose = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    return {word for code in prose for word in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)}


@pages
def test_commands_exist(page: Path):
    wrong = {" ".join(line): said for line in commands(page.read_text()) if (said := fault(line))}
    assert wrong.keys() - MISTYPED == set()


@pages
def test_options_exist(page: Path):
    assert named_options(page.read_text()) - known() == set()


@pages
def test_links_lead_somewhere(page: Path):
    assert list(broken_links(page, page.read_text())) == []


def test_wrong_names_are_found():
    assert named_options("`zerofit train --piepline 2`, `-v`\n```bash\nzerofit x --y\n```\n") == {"--piepline"}
    assert not OTHERS & set(options())
    block = "zerofit eval RUN; zerofit evil RUN    # 'so\nzerofit train x --data 'a\nb' | cat\n"
    found = list(commands(f"```bash\n{block}```\n"))
    assert found == [["eval", "RUN"], ["evil", "RUN"], ["train", "x", "--data", "a\nb"]]
    assert fault(found[1]) == "no such command: evil"
