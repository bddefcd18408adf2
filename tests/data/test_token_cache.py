from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

OPEN = """
import sys
import zerofit.data.token_cache as cache
from zerofit.data.opening import open_data
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run
{patch}
data = open_data(Run(data="text:" + sys.argv[1]), "causal-lm", 16, Reporter())
print(data.train.tokens, data.valid.tokens)
"""
SLOW = """
import time
put = cache.SplitWriter.put
def slow(self, split, part, values):
    put(self, split, part, values)
    self._files[split, part].flush()
    open(sys.argv[2], "a").write("x")
    time.sleep({seconds})
cache.SplitWriter.put = slow
"""
COUNTING = """
import time
from zerofit.data.cache import Preparation
build = Preparation._build
def counted(*args):
    open(sys.argv[2], "a").write("built ")
    time.sleep(0.3)
    build(*args)
Preparation._build = counted
"""


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02}.txt").write_text(f"document {i}\n" * (5 + i))
    return folder


def start(patch, *args):
    command = [sys.executable, "-c", OPEN.format(patch=patch), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finished(cache):
    return sorted(p.parent.name for p in cache.glob("tokens/*/meta.json"))


def test_four_processes_build_once(files, cache, tmp_path):
    marks = tmp_path / "marks"
    started = [start(COUNTING, f"{files}/*.txt", marks) for _ in range(4)]
    answers = {process.communicate(timeout=60)[0] for process in started}
    assert all(process.returncode == 0 for process in started)
    assert len(answers) == 1
    assert marks.read_text() == "built "
    assert len(finished(cache)) == 1


def test_a_killed_build_leaves_no_cache_and_is_swept(files, cache, tmp_path, opened):
    marks = tmp_path / "marks"
    process = start(SLOW.format(seconds=60), f"{files}/*.txt", marks)
    while not marks.exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert finished(cache) == [] and len(list(cache.glob("tokens/*.build"))) == 1
    other = files / "00.txt"
    opened(data=f"text:{other}", seq_len=16)  # another key: it cleans up as well
    assert list(cache.glob("tokens/*.build")) == []
    data = opened(data=f"text:{files}/*.txt", seq_len=16)
    assert data.train.tokens + data.valid.tokens == sum(p.stat().st_size for p in files.iterdir()) + 30


def test_a_build_under_way_is_not_swept(files, cache, tmp_path, opened):
    marks = tmp_path / "marks"
    process = start(SLOW.format(seconds=0.03), f"{files}/*.txt", marks)
    while not marks.exists():
        assert process.poll() is None
        time.sleep(0.01)
    opened(data=f"text:{files}/00.txt", seq_len=16)
    assert process.wait(timeout=60) == 0
    assert len(finished(cache)) == 2


def test_content_decides_and_time_stamps_do_not(files, cache, opened):
    opened(data=f"text:{files}/*.txt", seq_len=16)
    first = finished(cache)
    os.utime(files / "03.txt", (1, 1))
    opened(data=f"text:{files}/*.txt", seq_len=16)
    assert finished(cache) == first
    (files / "03.txt").write_text("changed " * 20)
    opened(data=f"text:{files}/*.txt", seq_len=16)
    assert len(finished(cache)) == 2


def test_a_warm_open_reads_no_text(files, opened, monkeypatch):
    from zerofit.data.text_sources import FileSource

    one = opened(data=f"text:{files}/*.txt", seq_len=16)
    monkeypatch.setattr(FileSource, "survey", lambda *a: pytest.fail("hashed again"))
    two = opened(data=f"text:{files}/*.txt", seq_len=16)
    assert (one.train.file.array() == two.train.file.array()).all()
    assert one.unigram_entropy_nats == two.unigram_entropy_nats


def test_a_damaged_cache_is_built_again(files, cache, opened):
    data = opened(data=f"text:{files}/*.txt", seq_len=16)
    path, whole = data.train.file.path, data.train.tokens
    os.truncate(path, 10)
    assert opened(data=f"text:{files}/*.txt", seq_len=16).train.tokens == whole
    (path.parent / "meta.json").write_text("{")
    assert opened(data=f"text:{files}/*.txt", seq_len=16).train.tokens == whole


def test_what_meta_json_says(files, cache, opened):
    data = opened(data=f"text:{files}/*.txt", seq_len=16)
    (key,) = finished(cache)
    meta = json.loads((cache / "tokens" / key / "meta.json").read_text())
    assert meta["documents"] == 30 and sum(meta["unigrams"]["train"]) == data.train.tokens
    train, valid = (np.array(data_.file.array()) for data_ in (data.train, data.valid))
    assert meta["unigrams"]["train"] == np.bincount(train, minlength=260).tolist()
    frequency = (np.bincount(train, minlength=260) + 1) / (len(train) + 260)
    assert data.unigram_entropy_nats == pytest.approx(-np.log(frequency[valid]).mean())


def test_a_cache_that_cannot_be_written_is_explained(files, tmp_path, refused, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "file" / "cache"))
    (problem,) = refused(data=f"text:{files}/*.txt", seq_len=16)
    assert problem.kind == "cache" and "ZEROFIT_CACHE" in problem.hint


def test_text_that_changes_meanwhile_is_refused(files, cache, refused, monkeypatch):
    from zerofit.data.cache import Preparation

    build = Preparation._build

    def disturbed(*args):
        (files / "00.txt").write_text("written to")
        build(*args)

    monkeypatch.setattr(Preparation, "_build", disturbed)
    (problem,) = refused(data=f"text:{files}/*.txt", seq_len=16)
    assert problem.kind == "data-changed" and finished(cache) == []
