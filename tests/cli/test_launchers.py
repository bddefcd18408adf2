"""Commands in the processes of a launcher: one of them prints, and only training joins the others."""

from __future__ import annotations

import json

import pytest

from zerofit.cli.main import main

WORLD = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29555"}
WORLD |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}


@pytest.fixture
def call(monkeypatch, capfd):
    """Exit code and output of a command as one of two processes that torchrun has started."""

    def called(rank, *words, **more):
        with monkeypatch.context() as patch:
            for name, value in (WORLD | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | more).items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main(list(words))
        return ended.value.code or 0, *capfd.readouterr()

    return called


def test_what_is_no_training_is_done_once(call):
    code, out, err = call(0, "models", "lenet", "--json")
    assert code == 0
    assert json.loads(out)["models"][0]["name"] == "lenet"
    assert "torchrun has started 2 processes" in err and "only `zerofit train` uses all" in err
    assert call(1, "models", "lenet", "--json") == (0, "", "")


def test_a_launch_in_a_launcher_s_world_is_refused_once(call):
    code, out, err = call(0, "launch", "lenet", "--hostfile", "none", "--json")
    assert code == 2
    assert json.loads(out)["error"]["kind"] == "world"
    assert "zerofit launch starts ranks itself" in err
    assert call(1, "launch", "lenet", "--hostfile", "none") == (2, "", "")
    code, _, err = call(1, "launch", "lenet", "--no-ssh", "--node-rank", "1")  # for a launcher that starts one a node
    assert code == 2 and "--hostfile" in err


def test_bad_words_and_a_bad_world_are_told_once(call):
    code, _, err = call(0, "--local_rank=0", "train", "lenet", "--step", "3")
    assert code == 2 and "--step" in err
    assert call(1, "--local_rank=1", "train", "lenet", "--step", "3") == (2, "", "")
    for rank in (0, 1):
        code, _, err = call(rank, "train", "lenet", WORLD_SIZE="two", MASTER_PORT="0")
        assert code == 2
        assert [name in err for name in ("WORLD_SIZE is 'two'", "MASTER_PORT is '0'")] == [rank == 0] * 2


def test_the_first_process_tells_that_its_port_is_taken(call):
    import socket

    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = call(0, "train", "lenet", "--data", "digits", MASTER_PORT=port)
    assert code == 2
    assert f"port {port}" in err and "--master_port" in err
