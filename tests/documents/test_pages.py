"""The page on the documents: its tables, what is kept, and the figures that follow from others."""

import json
import shlex

import pytest

from benchmarks.documents.__main__ import parse
from benchmarks.documents.batch_sizes import epochs_within, first_size, reached, soonest
from benchmarks.documents.document import DocumentRun, entries, result_store
from benchmarks.documents.page import Figure, TeachingDocument, write_documents
from benchmarks.documents.parallel_training import enlarged_digits
from zerofit.app.comparing.laboratory import Evidence, flags
from zerofit.app.comparing.rows import SizeRow
from zerofit.cli.compare import compare
from zerofit.cli.plan import plan
from zerofit.spec.errors import UserError


def row(size: int, *scores: float, seconds: float = 1.0, lr: float = 0.1) -> SizeRow:
    """A size whose epochs of so many seconds ended with these scores."""
    curve = [{"epoch": n, "seconds": n * seconds, "accuracy": score} for n, score in enumerate(scores, 1)]
    return SizeRow(status="ok", batch_size=size, seed=0, lr=lr, curve=curve, best_accuracy=max(scores))


def test_the_page(tmp_path):
    picture = tmp_path / "documents" / "rows" / "x" / "comparison.png"
    table = {"columns": ["way", "speed"], "rows": [["single", "5"], ["a|b", "2\n7"]], "picture": picture}
    evidence = Evidence(title="Ways", text="How.", command="zerofit x", notes=["slow <br>"], **table)
    about = {"title": "parallel", "network": "n", "experiment": "e"}
    figure = Figure(name="parameters", theirs="2", ours="3", why="one more")
    document = TeachingDocument(number="007", **about, figures=[figure], evidence=[evidence, evidence])
    write_documents(tmp_path / "documents.md", [document])
    lines = (tmp_path / "documents.md").read_text().splitlines()
    place = lines.index("## 007: parallel")
    heads = [n for n, line in enumerate(lines) if set(line) == {"|", "-"}]
    assert lines[heads[0] + 1] == "| parameters | 2 | 3 | one more |" and heads[0] > place
    assert lines[heads[1] - 1 : heads[1] + 3] == ["| way | speed |", "|---|---|", "| single | 5 |", r"| a\|b | 2 7 |"]
    assert all(not lines[n - 2] for n in heads)  # Markdown needs an empty line above a table
    after = lines[heads[1] + 3 : heads[1] + 8]
    assert after == ["", "![Ways](documents/rows/x/comparison.png)", "", "- slow &lt;br>", ""]
    json.dumps(document.to_dict())


def document(folder, number="000"):
    return DocumentRun(number, result_store(folder))


def test_what_was_measured_is_kept(tmp_path):
    assert document(tmp_path / "d").keep("x", lambda: {"a": 1.5}) == {"a": 1.5}
    assert document(tmp_path / "d").keep("x", lambda: pytest.fail("again")) == {"a": 1.5}
    (tmp_path / "d" / "rows" / "000-x.json").write_text('{"a": 1')  # cut by a kill
    assert document(tmp_path / "d").keep("x", lambda: [2]) == [2]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    with pytest.raises(UserError, match="contains other files"):
        result_store(tmp_path / "other")


@pytest.mark.parametrize("number", entries())
def test_entries_are_options_of_the_commands(number):
    """Each experiment is read by its command, and each plan by `zerofit plan`."""
    entry = entries()[number]
    for options in entry["experiments"].values():
        kind, words = options["kind"], flags({key: value for key, value in options.items() if key != "kind"})
        assert compare.commands[kind].make_context(kind, words).params["model"] == options["model"]
    for name in entry.get("plans", ()):
        command = shlex.split(document_of_plans(number)._plan(name, dict(entry["plans"][name]))["command"])
        assert plan.make_context("plan", command[2:]).params["model"] == entry["plans"][name]["model"]
    with pytest.raises(KeyError):  # a figure of the page lacks its value
        document_of_plans(number).page({}, [])


def document_of_plans(number):
    made = DocumentRun.__new__(DocumentRun)
    made.number, made.entry, made.keep = number, entries()[number], lambda name, forecast: {}
    return made


def test_unknown_documents_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["000", "0001"])
    assert ended.value.code == 2 and "unknown document 0001" in capsys.readouterr().err


def test_the_first_size_is_that_of_the_fewest_seconds():
    rows = [row(1, 0.98, seconds=9), row(16, 0.5, 0.97, seconds=2), row(256, *[0.6] * 7, 0.995), row(1024, 0.9)]
    assert reached(rows[1], 0.97) == (2, 4.0) and reached(rows[3], 0.97) is None
    assert first_size(rows, 0.97) == "16 (4 s, epoch 2)"
    assert first_size(rows, 0.99) == "256 (8 s, epoch 8)"
    assert first_size(rows, 0.999) == "none"
    tried = [row(64, 0.9, 0.96, lr=0.1), row(64, 0.9, 0.9, 0.97, lr=0.2), row(64, 0.8, 0.8, 0.8, 0.99, lr=0.3)]
    assert soonest(tried).lr == 0.2
    assert soonest([*tried[:1], row(64, 0.965, lr=0.4)]).lr == 0.4  # none is there: the best score


def test_epochs_of_some_hours():
    """40 h of 115,000 images at 800 a second: 144,000 s, of which an epoch takes 143.75."""
    assert epochs_within(40, 115_000, 800) == pytest.approx(1001.74, abs=0.01)


def test_digits_enlarged(tmp_path):
    from PIL import Image

    folder = enlarged_digits(tmp_path)
    files = sorted(folder.glob("train/*/*.png"))
    assert len(files) == 80 and len(list(folder.glob("val/*/*.png"))) == 100
    with Image.open(files[0]) as image:
        assert image.size == (112, 112)
