"""Logs: figures by version, causes by what the figures and the traceback show, ranks, and logs without an answer."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import lzma
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.explain.logs import MESSAGES, OTHERS, PHASES, full, traceback
from zerofit.explain import causes, log, messages, other_causes, tracebacks
from zerofit.explain.advice import NVIDIA_SMI
from zerofit.explain.data import read_data
from zerofit.explain.failures import _entries
from zerofit.explain.from_log import explain_log
from zerofit.explain.log import lines_of, read_ends, read_log
from zerofit.spec.foreign import Unreadable

GIB = 1 << 30


def explained(text: str):
    found = explain_log(lines_of(text))
    assert found is not None
    return found


@pytest.mark.parametrize("version", MESSAGES)
def test_the_figures_of_each_version(version):
    figures = explained(MESSAGES[version]).figures
    assert (figures.asked_bytes, figures.total_bytes, figures.free_bytes) == (2 * GIB, 24 * GIB, GIB // 2)
    assert (figures.allocated_bytes, figures.reserved_bytes, figures.beside_bytes) == (20 * GIB, 21 * GIB, 2.5 * GIB)
    if "Process 77" in MESSAGES[version]:
        assert figures.other_bytes == (2 * GIB,) and figures.process_bytes == 21.5 * GIB
    assert figures.limit_bytes == (22 * GIB if "HIP" in version else None)


@pytest.mark.parametrize("version", MESSAGES)
def test_a_message_that_a_terminal_wrapped(version):
    words, lines = MESSAGES[version].split(" "), [""]
    for word in words:
        lines = [*lines[:-1], f"{lines[-1]} {word}".strip()] if len(lines[-1]) < 60 else [*lines, word]
    assert explained("\n".join(lines)).figures == explained(MESSAGES[version]).figures


@pytest.mark.parametrize(("cause", "text"), [(cause, text) for cause, texts in PHASES.items() for text in texts])
def test_the_phase_names_the_cause_if_tensors_fill_the_gpu(cause, text):
    found = explained(text)
    assert found.cause == cause
    assert found.at == "/home/me/train.py:38" and found.changes


@pytest.mark.parametrize(("cause", "text"), [(cause, text) for cause, texts in OTHERS.items() for text in texts])
def test_messages_without_figures(cause, text):
    found = explained(text)
    assert found.cause == cause, found
    assert found.is_known or found.run_next


def test_the_figures_of_vllms_messages_are_its_settings_answers():
    not_free = explained(OTHERS["vllm-gpu-not-free"][0]).evidence
    assert not_free[1].endswith("gpu_memory_utilization=0.89")  # 0.89 x 22.05 GiB = 19.62 GiB are free
    newer, wrapped, older = (explained(text).evidence for text in OTHERS["vllm-sequence-too-long"])
    assert newer[0] == "one sequence of 131072 tokens needs 16.00 GiB, and the cache has 0.71 GiB"
    assert [found[1].split("=")[1] for found in (newer, wrapped, older)] == [
        *("5632 or less", "810208 or less", "3664 or less"),
    ]


def test_a_tensor_larger_than_the_device():
    assert explained(full(asked="31.00 GiB")).cause == "single-tensor"


def test_fragments_are_no_cause_if_they_are_too_few():
    assert explained(full(allocated="15.00 GiB", unused="7.00 GiB")).cause == "fragmentation"
    assert (
        explained(traceback("loss.backward()", error=full(asked="20.00 MiB", free="4.00 MiB"))).cause == "activations"
    )


def test_another_process_is_the_cause_only_if_there_would_be_room_without_it():
    message = MESSAGES["2.1"]
    assert (
        explained(message.replace("Tried to allocate 2.00 GiB", "Tried to allocate 1.50 GiB")).cause
        == "another-process"
    )
    assert (
        explained(message.replace("Tried to allocate 2.00 GiB", "Tried to allocate 9.00 GiB")).cause
        != "another-process"
    )


def test_ranks_on_one_gpu():
    text = "".join(f"[rank{rank}]: {MESSAGES['2.1']}\n" for rank in (0, 1))
    found = explained(text)
    assert found.cause == "ranks-share-device" and found.ranks == ("0", "1")


@pytest.mark.parametrize(
    "prefix", ["[rank3]: ", "[default3]:", "3: ", "[1,3]<stderr>:", "(Worker pid=3, ip=10.0.0.1) "]
)
def test_lines_of_ranks_are_told_apart(prefix):
    mine, other = (
        traceback("loss.backward()").splitlines(),
        prefix.replace("3", "5") + '  File "other.py", line 9, in f',
    )
    text = "\n".join(f"{prefix}{line}\n{other}" for line in mine)
    found = explained(text)
    assert found.at == "/home/me/train.py:38" and found.cause == "activations"


def test_a_notebook_and_a_rich_traceback():
    notebook = (
        "Traceback (most recent call last)\nCell In[5], line 3, in fit(x)\n----> 3 y.backward()\n\n"
        "File /opt/env/lib/python3.11/site-packages/torch/_tensor.py:648, in Tensor.backward(self)\n"
        "--> 648     torch.autograd.backward(\n\nOutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    )
    rich = (
        "╭────────── Traceback (most recent call last) ──────────╮\n│ /home/me/train.py:38 in main            │\n"
        "│ ❱  38     y.backward()         │\n╰───╯\nOutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    )
    # where a line of rich is too narrow: DeepSpeed#2977 (the function) and DeepSpeed#3448 (the path)
    narrow = (
        "│ /opt/conda/lib/python3.8/site-packages/deepspeed/accelerator/cuda_accele │\n"
        "│ rator.py:217 in          │\n│ pin_memory               │\n│        │\n"
        "│ ❱ 217 │   │   return tensor.contiguous()          │\n╰───╯\nRuntimeError: CUDA error: out of memory"
    )
    assert explained(narrow).cause == "pinned-memory" and not explained(narrow).at  # a library's line
    assert explained(rich).at == "/home/me/train.py:38"
    assert explained(notebook).phase == explained(rich).phase == "backward"


LIBRARIES = """Traceback (most recent call last):
  File "/opt/env/lib/python3.11/site-packages/timm/layers/norm.py", line 9, in forward
    x = x.view(3, 5)
ERROR
"""
CPU = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
)
CPU += "to allocate 4096000 bytes. Error code 12 (Cannot allocate memory)"


def test_on_a_cpu_rank_the_phase_names_the_cause():
    for cause in ("activations", "logits", "evaluation", "generation"):
        assert explained(PHASES[cause][0].replace(full(), CPU)).cause == cause
    later = "".join(f"step {step} loss: 1.0\n" for step in range(5)) + traceback("loss.backward()", error=CPU)
    assert not explained(later).is_known and "rss" in explained(later).run_next
    offloaded = ("deepspeed/ops/adam/cpu_adam.py", 9, "step", "self.ds_opt_adam.adam_update(")
    assert explained(traceback("engine.step()", offloaded, error=CPU)).cause == "offloaded-states"


def test_a_cpu_rank_is_not_told_to_offload_and_a_rank_that_builds_a_model_loads_weights():
    assert not any("offload" in row.change for row in explained(PHASES["activations"][0].replace(full(), CPU)).changes)
    assert explained(PHASES["weights"][1].replace(full(), CPU)).cause == "weights-in-host-memory"
    assert explained(PHASES["states"][0].replace(full(), CPU)).cause == "offloaded-states"  # in ZeRO's optimizer
    without_zero = PHASES["states"][0].replace("zero/stage_1_and_2", "bf16_optimizer").replace(full(), CPU)
    assert explained(without_zero).cause == "states"


def test_a_traceback_through_libraries_alone_has_no_line_of_the_user():
    found = explained(PHASES["weights"][0].replace("/home/me/", "/opt/env/lib/python3.11/site-packages/program/"))
    assert (found.at, found.asked_by) == ("", "program/train.py:38")
    error = "RuntimeError: shape '[3, 5]' is invalid for input of size 16"
    found = explained(LIBRARIES.replace("ERROR", error))
    assert (found.at, found.asked_by) == ("", "timm/layers/norm.py:9")


def test_the_limit_of_a_job_is_not_the_hosts_memory():
    limited, host = (explained(OTHERS["host-memory"][at]).summary for at in (1, 0))
    assert limited == "The job reached its memory limit." and host == "The host ran out of memory."


def test_the_kernels_report_of_a_control_group():
    kernel = (
        "[17.1] python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0\n"
        "[17.2] memory: usage 1048576kB, limit 1048576kB, failcnt 123\n"
        "[17.3] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=4021,uid=0\n"
        "[17.4] Memory cgroup out of memory: Killed process 4021 (python) total-vm:9000000kB, anon-rss:1020000kB, "
        "file-rss:4096kB, shmem-rss:0kB, UID:0 pgtables:4000kB"
    )
    figures = explained(kernel).figures
    assert (figures.limit_bytes, figures.process_bytes) == (GIB, (1020000 + 4096) << 10)


def test_memory_that_grows_with_each_step_is_a_leak():
    lines = []
    for step in range(8):
        lines += [
            "[INFO] [utils.py:1:see_memory_usage] after step",
            f"[INFO] [utils.py:2:see_memory_usage] MA {8 + step}.5 GB  Max_MA 20 GB  CA 22 GB  Max_CA 22 GB",
            f"step: {step} loss: 1.2",
        ]
    found = explained("\n".join(lines) + "\n" + traceback("loss.backward()"))
    assert found.cause == "leak" and found.steps == 8


def test_a_log_without_a_message_and_files_of_any_content(tmp_path):
    assert explain_log(lines_of("loss 1.2\nmemory: 3 GB\ndone")) is None
    file = tmp_path / "log"
    file.write_bytes("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB".encode("utf-16"))
    assert explain_log(read_log(file)) is not None
    file.write_bytes(bytes(range(256)) * 50)
    assert explain_log(read_log(file)) is None
    for archive in (gzip, bz2, lzma):
        file.write_bytes(archive.compress(traceback("loss.backward()").encode()))
        assert explain_log(read_log(file)) is not None
    for content in (gzip.compress(b"loss")[:10], b"PK\x03\x04"):
        file.write_bytes(content)
        with pytest.raises(Unreadable, match="archive"):
            read_log(file)
    noise = random.randbytes(500_000).hex()  # more than a block of bz2
    for archive in (gzip, bz2, lzma):  # the writer was killed
        file.write_bytes(archive.compress(f"CUDA out of memory\n{noise}".encode())[:-100])
        assert read_log(file)[0].text == "CUDA out of memory"
    file.write_text("CUDA out of memory. Tried to allocate 1.2.3 GiB (GPU 9999; -1 GiB total capacity; GiB free")
    assert explain_log(read_log(file)) is not None


def test_a_very_long_log_lacks_its_middle(monkeypatch):
    monkeypatch.setattr(log, "MOST_BYTES", 1000)
    monkeypatch.setattr(log, "HEAD_BYTES", 100)
    monkeypatch.setattr(log, "CHUNK_BYTES", 70)
    for size in (999, 1000, 1001, 2001, 50_000):
        content = random.randbytes(size)
        found = read_ends(io.BytesIO(content))
        assert found == (content if size <= 1000 else content[:100] + b"\n" + content[-900:])


def shortest(tree) -> Iterator[str]:
    """Return a shortest match of each alternative of a parsed pattern; a space for ".*"."""
    parts = []
    for op, value in tree:
        if str(op) == "LITERAL":
            parts.append([chr(value)])
        elif str(op) == "IN":
            kind, what = value[0]
            characters = {"CATEGORY_DIGIT": "0", "CATEGORY_WORD": "a", "CATEGORY_SPACE": " ", "CATEGORY_NOT_SPACE": "x"}
            parts.append([characters.get(str(what)) or (chr(what) if str(kind) == "LITERAL" else "0")])
        elif str(op) == "BRANCH":
            parts.append([text for branch in value[1] for text in shortest(branch)])
        elif str(op) == "SUBPATTERN":
            parts.append(list(shortest(value[3])))
        elif str(op).endswith("_REPEAT"):
            space = " " * (str(value[2][0][0]) == "ANY")
            parts.append([text * value[0] or space for text in shortest(value[2])])
        else:
            assert str(op) in ("AT", "ANY", "ASSERT_NOT", "NOT_LITERAL"), op
            parts.append(["x" if str(op) in ("ANY", "NOT_LITERAL") else ""])
    return map("".join, itertools.product(*parts))


@pytest.mark.parametrize("kind", messages.signs())
def test_no_message_lacks_the_words_that_are_looked_for_first(kind):
    pattern = messages.signs()[kind].pattern
    texts = list(shortest(re._parser.parse(pattern.pattern)))  # pyright: ignore[reportAttributeAccessIssue]
    assert all(pattern.search(text) for text in texts)
    assert not [text for text in texts if not any(word in text for word in messages._WORDS)]


def test_the_entries_have_the_names_that_the_code_reads():
    """A phase, kind or cause with a wrong name would never be found."""
    phases, changes = read_data("phases.yaml"), read_data("shortages.yaml")["changes"]
    assert phases["calls"].keys() == {*causes._IN_PHASE, tracebacks.LOADING}
    assert phases["calls"].keys() >= {*phases["lasting"], *itertools.chain(*phases["lasting"].values())}
    assert phases["log"].keys() >= {*other_causes._HOST_WORK, *other_causes._HOST_PHASES.values()}
    assert messages.signs().keys() == causes._RULES.keys() | other_causes.CERTAIN.keys()
    assert {sign.place for sign in messages.signs().values()} == {"device", "host", "shared memory", "kernel"}
    code = "".join(path.read_text() for path in Path(causes.__file__).parent.glob("*.py"))
    named = set(re.findall(r'name="([a-z-]+)"', code)) | {cause for cause, _ in causes._IN_PHASE.values()}
    assert named <= changes.keys() and not [cause for cause in changes if f'"{cause}"' not in code]
    texts = list(itertools.chain(*changes.values()))
    # "a: b" without quotes is an object in YAML
    assert all(isinstance(text, str) for text in texts)
    assert all(NVIDIA_SMI in text for text in texts if "nvidia-smi" in text)  # replaced on other devices
    for entry in (*_entries("causes"), *_entries("consequences")):
        assert all(isinstance(text, str) for text in (entry.cause, entry.summary, entry.run_next, *entry.changes))
