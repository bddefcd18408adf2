"""Figures that pages share: those of committed results, and those of a page and its translation."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import ROUND_CEILING, ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.test_docs_zh import FENCE, ROOT, code
from zerofit.compare.job import STRATEGIES

NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e-?\d+)?")
TRANSLATIONS = {"README.md": "README.md", "docs/fit.md": "fit.md"}
BEFORE = {"fit.md": 2}  # sections of a translation that come before those of its page


@cache
def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def percent(*shares: float, digits: int = 1, rounding: str = ROUND_HALF_UP) -> list[str]:
    """Return the sizes of shares as pages write them."""
    unit = Decimal(1).scaleb(-digits)
    return [str((100 * abs(Decimal(str(share)))).quantize(unit, rounding)) for share in shares]


def within(share: float, digits: int) -> list[str]:
    return percent(share, digits=digits, rounding=ROUND_CEILING)


def memory() -> list[str]:
    """`simulate` and `plan` against real runs on CPUs: runs, kinds of models, peaks, errors."""
    found = result("memory-accuracy-cpu.json")
    plain, kernels, planned = (found["errors"][name] for name in ("simulated", "with_kernels", "planned"))
    names = [row["name"].split()[0] for row in found["configurations"]]
    counts = [str(len(names)), str(len(set(names))), str(plain["count"])]
    errors = percent(plain["median"], digits=5) + percent(kernels["most"], planned["median"], digits=3)
    return counts + errors + percent(plain["most"], planned["most"])


def memory_on_a_gpu() -> list[str]:
    """The largest errors of trainings, of scripts, and of what was reserved: of most, of ViT, of ResNet."""
    trained, scripts = ({k: v["errors"] for k, v in result(f"gpu-{kind}.json")["cases"].items()} for kind in KINDS)
    assert (len(trained), len(scripts)) == (9, 4)  # the pages have them in words
    reserved = {name: one["reserved_bytes"] for name, one in trained.items()}
    vit, resnet = (max((abs(v) for k, v in reserved.items() if k.startswith(name))) for name in ("vit", "resnet50"))
    others = max(abs(v) for k, v in reserved.items() if not k.startswith(("vit", "resnet50")))
    found = within(largest(trained), 1) + within(largest(scripts), 3)
    return found + within(others, 2) + percent(vit) + [f"{100 * resnet:.0f}"]


KINDS = ("training", "scripts")


def largest(errors: dict[str, dict[str, float]]) -> float:
    return max(abs(one["allocated_bytes"]) for one in errors.values())


def trainings_on_a_gpu() -> list[str]:
    """The largest error of all."""
    return memory_on_a_gpu()[:1]


def script_errors(figure: str) -> list[float]:
    found = []
    for row in result("script-accuracy-cpu.json")["scripts"]:
        for rank in {phase["rank"] for phase in row["phases"]}:
            mine = [phase for phase in row["phases"] if phase["rank"] == rank and phase["step"] >= 0]
            found.append(abs(max(phase[figure] for phase in mine) / max(phase["real_bytes"] for phase in mine) - 1))
    return found


def scripts() -> list[str]:
    """How many scripts were simulated, their largest error, and what oneDNN's scratch makes of it."""
    kernels, plain = (max(script_errors(name)) for name in ("with_kernels_bytes", "simulated_bytes"))
    count = len(result("script-accuracy-cpu.json")["scripts"])
    return [str(count), *percent(kernels, digits=4), *percent(plain, digits=2)]


def script_table() -> list[str]:
    found = script_errors("with_kernels_bytes")
    return percent(median(found), digits=5) + percent(max(found), digits=4)


def step_times() -> list[str]:
    """How many figures, median and 90th percentile of errors, and without the figure's own source, of each kind."""
    found, cells = result("time-accuracy.json"), []
    for name in [name for name, row in found.items() if isinstance(row, dict) and "p90" in row]:
        rows = found[name], found["left_out"][name]
        errors = [error for row in rows for error in (row["median"], row["p90"])]
        cells += [str(rows[0]["figures"]), *percent(*errors, digits=0)]
    return cells


def collectives() -> list[str]:
    """Forecast / published seconds of each collective, by size."""
    return [f"{value:.2f}" for row in result("collective-curves.json")["summary"] for value in row["median"].values()]


def step_times_of_all() -> list[str]:
    """How many figures, median and 90th percentile of errors."""
    count, median_error, p90, *_ = step_times()
    return [count, median_error, p90]


def peers() -> list[str]:
    """Median and largest error of each estimator, on the runs that train all weights and on those with adapters."""
    rows, found = result("peers.json"), []
    for name in rows[0]["estimates"]:
        for trained in ("all weights", "adapters"):
            those = [row for row in rows if row["trained"] == trained and row["estimates"][name] is not None]
            errors = [abs(row["estimates"][name] / row["bytes"] - 1) for row in those]
            found += percent(median(errors), max(errors), digits=0)
    return found


def fit() -> list[str]:
    found = result("fit.json")
    least = min(job["least_share"] for job in found["jobs"])
    shares = [share for job in found["jobs"] for share in (job["share_of_best"], job["least_share"])]
    shares += [found["share_of_best"], least, found["share_of_best_by_time_alone"]]
    return [str(found["limits"]), *percent(*shares)]


def kills(name: str) -> list[str]:
    found = result(name)
    assert found["kills_that_lost_something"] == found["runs_that_ended_differently"] == 0
    return [str(found["kills"]), str(found["kills_while_saving"]), *map(str, found["by_victim"].values())]


def bandwidth() -> list[str]:
    found = result("checkpoint-bandwidth.json")
    shares = [f"{found[name]:.2f}" for name in ("save_against_torch_save", "load_against_torch_load")]
    return [*shares, *percent(found["stall_of_blocking_save"], digits=0)]


def export() -> list[str]:
    found = result("export_speed.json")["large"]
    peak = max(row["peak_bytes"] for row in found["rows"] if row["program"] == "zerofit ckpt export")
    return [f"{found['checkpoint_bytes'] / 1e9:.0f}", f"{peak / 1e9:.2f}"]


def export_times() -> list[str]:
    found = result("export_speed.json")
    programs = {row["program"] for row in found["large"]["rows"]}
    seconds = [[row["seconds"] for row in found["large"]["rows"] if row["program"] == p] for p in sorted(programs)]
    largest = found["sparse"]
    figures = [*(end(own) for own in seconds for end in (min, max)), largest["seconds"], largest["cpu_seconds"]]
    return [*(f"{figure:.0f}" for figure in figures), f"{largest['peak_bytes'] / 1e9:.2f}"]


def same_weights() -> list[str]:
    rows = [row for row in result("same-weights/results.json")["rows"] if row["synchronous"] and row["status"] == "ok"]
    return [f"{max(row['max_weight_difference'] for row in rows):.1e}".replace("e-0", "e-")]


def strategies() -> list[str]:
    return [str(len(STRATEGIES))]


# figures, and the pages that have them: in the paragraphs with these words
CLAIMS: list[tuple[Callable[[], list[str]], dict[str, str]]] = [
    (memory, {"docs/how-exact.md": "# Memory"}),
    (memory_on_a_gpu, {"docs/how-exact.md": "# Memory"}),
    (trainings_on_a_gpu, {"README.md": "On an H100, nine", "docs/zh/README.md": "九次训练与预测"}),
    (scripts, {"docs/how-exact.md": "# Scripts"}),
    (script_table, {"benchmarks/README.md": "The peaks' errors are"}),
    (collectives, {"benchmarks/README.md": "How far collectives are"}),
    (peers, {"README.md": "Compared with other", "docs/zh/README.md": "与其他估算工具比较"}),
    (step_times, {"docs/how-exact.md": "# Step times"}),
    (step_times_of_all, {"README.md": "The median error of step times", "docs/zh/README.md": "单步时间误差"}),
    (
        fit,
        {
            "docs/fit.md": "How good the choice is",
            "docs/zh/fit.md": "选择有多好",
            "benchmarks/README.md": "How near `--fit` comes",
        },
    ),
    (lambda: kills("kills.json"), {"docs/reliability.md": "results/kills.json"}),
    (lambda: kills("kills_lora.json")[:1], {"docs/reliability.md": "results/kills_lora.json"}),
    (lambda: [str(result("damage.json")["cases"])], {"docs/reliability.md": "results/damage.json"}),
    (bandwidth, {"docs/reliability.md": "followed by a sync"}),
    (export, {"docs/export.md": "a checkpoint of 81 GB"}),
    (export_times, {"docs/export.md": "For a 7B on 8 ranks"}),
    (same_weights, {"docs/laboratory.md": "the mean of the shares"}),
    (strategies, {"docs/compare.md": "compare strategies lenet"}),
]


def said_near(page: str, words: str) -> Counter[str]:
    """Return the numbers of the paragraph, or the section with such a title, that has these words."""
    text = (ROOT / page).read_text()
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        title, _, _ = section.partition("\n")
        if title.startswith("#") and words in title:
            return Counter(NUMBER.findall(section))
    found = [part for part in re.split(r"\n\n|\n(?=\|)", text) if words in part]
    assert found, f"{page} has no paragraph with {words!r}"
    return Counter(NUMBER.findall(found[0]))


@pytest.mark.parametrize(("figures", "pages"), CLAIMS)
def test_pages_have_the_figures_of_the_results(figures, pages):
    expected = Counter(figures())
    for page, words in pages.items():
        assert expected - said_near(page, words) == Counter(), page


def sections(text: str) -> Iterator[tuple[str, Counter[str]]]:
    """Yield the title of each section, and the numbers and names in it, outside of code blocks and links."""
    prose = re.sub(r"\]\([^)]+\)", "]", FENCE.sub("", text))
    for part in re.split(r"^(?=#+ )", prose, flags=re.MULTILINE)[1:]:
        yield part.partition("\n")[0], Counter(NUMBER.findall(part) + re.findall(r"`[^`\n]+`", part))


def differences(page: str, translation: str, before: int) -> dict[str, tuple[Counter[str], Counter[str]]]:
    """Return the sections that differ: what only the page has, and only the translation."""
    theirs, ours = list(sections(page)), list(sections(translation))[before:]
    assert len(theirs) == len(ours)
    pairs = {title: (own - other, other - own) for (title, own), (_, other) in zip(theirs, ours, strict=True)}
    return {title: pair for title, pair in pairs.items() if any(pair)}


@pytest.mark.parametrize("page", TRANSLATIONS)
def test_a_page_and_its_translation_have_the_same_figures_names_and_code(page):
    name, text = TRANSLATIONS[page], (ROOT / page).read_text()
    translation = (ROOT / "docs" / "zh" / name).read_text()
    assert differences(text, translation, BEFORE.get(name, 0)) == {}
    assert set(code(text)) - set(code(translation)) == set()


def test_a_figure_of_one_page_alone_is_found():
    english, chinese = "# A\n1 of 20 runs\n## B\n5 % [x](b9.md) `a`\n", "# 甲\n20 次中的 1 次\n## 乙\n6 %\n"
    assert differences(english, chinese, 0) == {"## B": (Counter(["5", "`a`"]), Counter(["6"]))}


def test_every_translation_is_compared():
    assert {path.name for path in Path(ROOT, "docs", "zh").glob("*.md")} == set(TRANSLATIONS.values())
