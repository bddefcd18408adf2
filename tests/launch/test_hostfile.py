"""Hostfiles: what the deepspeed launcher reads is read alike; what it would misread is refused with line and column."""

from __future__ import annotations

import gc
import time

import pytest
from deepspeed.launcher import runner

from tests.launch.hostile import HOSTILE
from zerofit.launch.hostfile import Host, read_hostfile, select, write_hostfile
from zerofit.spec.errors import UserError

GOOD = "# two racks\nnode-1 slots=4\n\nnode_2.lan   slots=2  # half of it\n"


def written(tmp_path, text):
    path = tmp_path / "hosts"
    path.write_text(text)
    return path


def problems_of(tmp_path, text):
    with pytest.raises(UserError) as error:
        read_hostfile(written(tmp_path, text))
    return error.value.problems


def test_it_is_read_as_deepspeed_reads_it(tmp_path):
    path = written(tmp_path, GOOD)
    hosts = read_hostfile(path)
    assert {h.name: h.slots for h in hosts} == dict(runner.fetch_hostfile(str(path)))
    write_hostfile(tmp_path / "again", hosts)
    assert dict(runner.fetch_hostfile(str(tmp_path / "again"))) == {"node-1": 4, "node_2.lan": 2}


def test_every_fault_is_named_with_line_and_column(tmp_path):
    found = problems_of(tmp_path, "a slots=2\n  b slots=x\na slots=1\nc\nd slots=0\ne slots=2 gpu\n")
    places = [p.where.rpartition("hosts:")[2] for p in found]
    assert places == ["2:5", "3:1", "4:2", "5:3", "6:11"]
    assert "first on line 1" in found[1].message


@pytest.mark.parametrize("name", [*HOSTILE, "-oProxyCommand=x", "a,b", "u@h", "h%n", "[1-3]"])
def test_no_name_that_a_shell_or_ssh_would_read(tmp_path, name):
    if name.startswith("#") or not name.strip():
        return
    found = problems_of(tmp_path, f"{name} slots=1\n")
    assert found


def test_the_hint_for_a_form_of_another_launcher_names_ours(tmp_path):
    found = problems_of(
        tmp_path, "node1:8\n2001:db8::2 slots=8\nnode[1-4] slots=8\nroot@n slots=1\nb slots=1\nB slots=1\n"
    )
    words = ("node1 slots=8", "/etc/hosts", "one line per host", "~/.ssh/config", "on one line")
    assert [word in problem.hint for word, problem in zip(words, found, strict=True)] == [True] * 5


@pytest.mark.parametrize("slots", ["0", "4097", "9" * 12, "9" * 5000, "-1"])
def test_slots_that_no_host_has(tmp_path, slots):
    (problem,) = problems_of(tmp_path, f"a slots={slots}\n")
    assert "1 to 4096" in problem.message


def test_what_readline_takes_as_one_line_is_one(tmp_path):
    (problem,) = problems_of(tmp_path, "a slots=1\x0cb slots=2\n")
    assert problem.where.endswith(":1:11")
    assert read_hostfile(written(tmp_path, "\ufeffa slots=2\r\n")) == (Host("a", 2),)


def test_many_hosts_are_read_in_linear_time(tmp_path):
    def seconds(count: int) -> float:
        path = written(tmp_path, "".join(f"node-{n} slots=8\n" for n in range(count)))
        began = time.process_time()
        assert len(select(read_hostfile(path), None, f"node-{count - 1}")) == count - 1
        return time.process_time() - began

    gc.disable()  # a collection walks all that other tests have left
    try:
        assert seconds(20_000) < 40 * seconds(2000)  # 10 times; it was 100 times, and 20 seconds
    finally:
        gc.enable()


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_an_empty_one_and_a_missing_one(tmp_path, text):
    assert "no host in the hostfile" in problems_of(tmp_path, text)[0].message
    with pytest.raises(UserError, match="cannot read the hostfile"):
        read_hostfile(tmp_path / "nowhere")


FILTERS = [("a", None), ("a@c:0,2", None), (None, "b"), (None, "a:1@c"), ("c:1", None), (None, "a:0")]
FILTERS += [
    ("a:0@a:1", None),
    ("c:2@a@c:0", None),
    (None, "c:0@c:2"),
    ("b:3,1@b:1", None),
    (None, "a:0@b@a:1"),
    ("b:01", None),
]


@pytest.mark.parametrize(("include", "exclude"), FILTERS)
def test_filters_leave_what_deepspeeds_filters_leave(include, exclude):
    hosts = [Host("a", 2), Host("b", 4), Host("c", 3)]
    pool = {h.name: list(range(h.slots)) for h in hosts}
    theirs = runner.parse_resource_filter(pool, include or "", exclude or "")
    assert {h.name: list(h.ids) for h in select(hosts, include, exclude)} == dict(theirs)


# one part would take back what another says, or DeepSpeed's reader ends in a ValueError
TWICE = ["a@a", "a:0@a", "a@a:0", "a:0@b@a", "b:0-2", "b:0 2", "b:-1", "@", " a", "a:" + "9" * 5000]


@pytest.mark.parametrize("include", ["d", "a:2", "a:x", "a:", "", "b@", "$(touch x)", *TWICE])
def test_filters_that_name_nothing(include):
    hosts = [Host("a", 2), Host("b", 4)]
    if not include:
        assert select(hosts, include, None) == tuple(hosts)
        return
    with pytest.raises(UserError):
        select(hosts, include, None)
    with pytest.raises(UserError):
        select(hosts, None, "a@b")
