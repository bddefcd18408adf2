"""Programs that pip installs, and that start ranks by a launcher themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.simulate.script.scripts import facts, refused, simulated
from tests.simulate.script.test_scripts import LOOP
from zerofit.simulate.ops.tracker import is_own

PROGRAM = f"""\
#!{sys.executable}
import os, subprocess, sys

subprocess.run([sys.executable, "-c", ""], check=True)
subprocess.run("cat <<'END'\\nit's not for shlex\\nEND", shell=True, check=True, stdout=subprocess.DEVNULL)
if sys.argv[1] == "run":
    env = {{**os.environ, "KNOB": "1"}}
    subprocess.run("torchrun --nproc_per_node 2 inner.py --lr 1".split(), check=True, env=env)
elif sys.argv[1] == "python":
    subprocess.run([sys.executable, "package/inner.py", "--lr", "1"], check=True, env={{**os.environ, "KNOB": "1"}})
elif sys.argv[1] == "exec":
    os.environ["KNOB"] = "1"
    os.execvpe("accelerate", ["accelerate", "launch", "-m", "inner", "--lr", "1"], os.environ)
elif sys.argv[1] == "shell":
    os.system("mkdir -p . && cd . ; KNOB=1 torchrun --nproc_per_node 2 inner.py --lr 1 2>&1 | tee log")
elif sys.argv[1] == "bash":
    subprocess.run(["bash", "-ec", "env KNOB=1 torchrun --nproc_per_node 2 inner.py --lr '1'; echo done"])
raise AssertionError("ranks were not started")
"""


@pytest.fixture
def words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    program = folder / "bin" / "trainer-cli"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    check = "assert sys.argv[1:] == ['--lr', '1'] and os.environ['KNOB'] == '1' and os.environ['WORLD_SIZE'] == '2'\n"
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    for file in (folder / "inner.py", folder / "package" / "inner.py"):
        file.write_text(LOOP.replace("for i in", check + "for i in"))
    return "trainer-cli"


@pytest.mark.parametrize(
    ("how", "started"),
    [
        ("run", "torchrun --nproc_per_node 2 inner.py"),
        ("exec", "accelerate"),
        ("python", sys.executable),
        ("shell", "torchrun --nproc_per_node 2 inner.py --lr 1"),
        ("bash", "torchrun"),
    ],
)
def test_one_of_the_ranks_that_a_program_starts_is_simulated(words, how, started):
    seen = facts(simulated("", f"{words} {how}")).facts
    assert seen.ended == "stopped after 2 optimizer steps" and seen.parameters
    assert any(note.text.startswith(f"trainer-cli starts ranks itself: {started}") for note in seen.notes)


def test_other_ranks_than_are_simulated(words):
    problem = refused("", f"{words} run", gpus=4)
    assert problem.message == "the command starts 2 ranks, but --gpus is 4" and problem.where == "--gpus"


PADDED = """\
import torch
from datasets import Dataset
from flash_attn.bert_padding import pad_input, unpad_input

rows = Dataset.from_dict({"n": [3, 5]}).map(lambda row: {"twice": row["n"] * 2}, num_proc=2)
assert rows.filter(lambda row: row["n"] > 3, num_proc=2)["twice"][:] == [10]
mask = (torch.arange(8) < torch.tensor(rows["n"][:])[:, None]).long().cuda()
net = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    flat, indices, ends, longest, used = unpad_input(net(torch.randn(2, 8, 16, device="cuda")), mask)
    assert flat.shape == (8, 16) and indices.tolist() == [0, 1, 2, 8, 9, 10, 11, 12]
    assert (longest, ends.tolist(), used.tolist()) == (5, [0, 3, 8], [3, 5])
    out = pad_input(flat, indices, 2, 8)
    assert out.shape == (2, 8, 16)
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_trainers_use_around_attention_and_data(folder):
    """OpenRLHF and verl remove padding with flash_attn's functions, and preprocess data in other processes."""
    assert facts(simulated(PADDED)).facts.ended == "stopped after 2 optimizer steps"


BUFFERS = """\
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group()
net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16))
net = FullyShardedDataParallel(net, device_id=0, sync_module_states=True)
assert {str(buffer.device) for buffer in net.buffers()} == {"cuda:0"}
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.randn(8, 16, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_fsdp_that_sends_buffers(folder):
    """As verl wraps its models: the buffers are on the host until FSDP moves them."""
    seen = facts(simulated(BUFFERS, "torchrun --nproc_per_node 2 train.py")).facts
    assert seen.ended == "stopped after 2 optimizer steps" and seen.sharding == "FSDP"


SPAWNED = """\
import os, torch
import torch.distributed as dist
import torch.multiprocessing as mp
from datasets import Dataset

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)
        self.inner.weight = type(self.inner.weight)(torch.randn(16, 16), requires_grad=True)

    def forward(self, images):
        real = (images == 0).sum(-1) != 16
        counts = real.view(2, 4).sum(dim=1)
        parts = images[real].split(counts.tolist())
        assert [len(part) for part in parts] == [4, 4] and real.sum().item() == 8
        return self.inner(torch.cat(parts))

def main(rank, world):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29501"}
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(rank)
    net = torch.nn.parallel.DistributedDataParallel(Net().cuda(), device_ids=[rank])
    assert isinstance(net.module.inner.weight, torch.nn.Parameter)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(9):
        out = net(torch.randn(8, 16, device=rank))
        assert (out > 1).sum().item() == 0  # a measure
        out.sum().backward()
        optimizer.step()

if __name__ == "__main__":
    mp.set_start_method("spawn")
    Dataset.from_dict({"n": [3, 5]}).save_to_disk("prepared", num_proc=1)
    assert Dataset.load_from_disk("prepared")["n"][:] == [3, 5]
    mp.spawn(main, args=(2,), nprocs=2, join=True)
"""

STARTED = """\
    ranks = [mp.Process(target=main, args=(rank, 2)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert all(rank.exitcode == 0 for rank in ranks)
"""


CLASSES = """\
    class Log(mp.Process):
        def run(self):
            pass

    class Rank(mp.Process):
        def __init__(self, rank):
            super().__init__()
            self.rank = rank

        def run(self):
            main(self.rank, 2)

    Log().start()
"""


def test_a_script_that_spawns_its_ranks_and_processes_of_its_data(folder):
    seen = facts(simulated(SPAWNED)).facts
    assert seen.ended == "stopped after 2 optimizer steps" and seen.parameters == 16 * 17 and seen.sharding == "DDP"
    assert any("mask with unknown values is summed" in note.text for note in seen.notes)
    assert not (folder / "prepared").exists()
    text = SPAWNED.replace("    mp.spawn(main, args=(2,), nprocs=2, join=True)\n", STARTED)
    seen = facts(simulated(text, rank=1)).facts
    assert seen.ended == "stopped after 2 optimizer steps" and seen.sharding == "DDP"
    short = text.replace("range(9)", "range(1)").replace(STARTED, CLASSES + STARTED)
    own = short.replace("mp.Process(target=main, args=(rank, 2))", "Rank(rank)")
    assert facts(simulated(own)).facts.ended == "ended by itself"
    for script in (SPAWNED, text):
        assert refused(script, gpus=4).message == "the command starts 2 ranks, but --gpus is 4"


def test_packages_in_a_folder_of_pip_are_not_the_users_code(tmp_path, monkeypatch):
    """As `pip install --target` makes them, for PYTHONPATH."""
    (tmp_path / "site" / "tool-1.0.dist-info").mkdir(parents=True)
    for name in ("site", "mine"):
        monkeypatch.syspath_prepend(str(tmp_path / name))
    assert [is_own(str(tmp_path / name / "code.py")) for name in ("site", "mine")] == [False, True]
