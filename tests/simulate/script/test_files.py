"""Files of a simulated script: what it writes goes to scratch, and it can read it."""

from __future__ import annotations

import os
import runpy
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from tests.simulate.script.scripts import facts, refused, simulated
from zerofit.simulate.script.files import ScratchFiles

TRAINED = """
import torch
model = torch.nn.Linear(8, 8).to("cuda" if torch.cuda.is_available() else "cpu")
optimizer = torch.optim.AdamW(model.parameters())
for i in range(4):
    model(torch.randn(2, 8, device=model.weight.device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# runs alike with real files
FILES = """\
import bz2, csv, json, logging, os, pathlib, pickle, shutil, sqlite3, tarfile, tempfile
import datasets
import numpy as np
import pandas
import torch
import torch.package
from tokenizers import ByteLevelBPETokenizer, models
from torchvision.io import read_image, write_png

shutil.rmtree("old")  # the user's own
os.makedirs("old/a/b", exist_ok=True)
assert os.listdir("old") == ["a"] and not os.path.exists("old/weights.bin")
out = pathlib.Path("outputs") / "run"
out.mkdir(parents=True)
(out / "args.json").write_text(json.dumps({"lr": 1}))
assert json.loads((out / "args.json").read_text())["lr"] == 1
with open("mine.csv", "a", newline="") as file:
    csv.writer(file).writerow(["new", 2])
assert open("mine.csv").read().split() == ["a,1", "new,2"]
assert "mine.csv" in os.listdir() and any(entry.name == "outputs" for entry in os.scandir())
before = os.getcwd()
os.chdir(out)  # as hydra does
assert os.getcwd() == os.path.join(before, "outputs", "run") and pathlib.Path("../../mine.csv").exists()
np.save("stats.npy", np.arange(5))
assert np.load("stats.npy").sum() == 10
shared = np.memmap("map.bin", dtype=np.float32, mode="w+", shape=(10, 10))
shared[:] = 1
assert np.memmap("map.bin", dtype=np.float32, mode="r", shape=(10, 10)).sum() == 100
os.symlink(src="stats.npy", dst="latest.npy")
assert np.load("latest.npy").sum() == 10
database = sqlite3.connect(database="log.db")
database.execute("create table t(x)")
database.close()
from sqlite3 import dbapi2  # as SQLAlchemy imports it
uris = ("file:uri%20.db?mode=rwc", "file::memory:", "file:x?mode=memory")
for name, is_uri in (("more.db", False), ("", False), *((uri, True) for uri in uris)):
    dbapi2.connect(name, uri=is_uri).execute("create table t(x)")
logging.FileHandler("train.log").close()
pathlib.Path("text.txt").write_text("a word and a word " * 9)
words = ByteLevelBPETokenizer()
words.train(files="text.txt", vocab_size=270, show_progress=False)  # by compiled code, like the next two
assert words.save_model(".") == [os.path.join(".", name) for name in ("vocab.json", "merges.txt")]
assert len(models.BPE.read_file("vocab.json", "merges.txt")[0]) == words.get_vocab_size()
for name in ("text.txt", "vocab.json", "merges.txt"):
    os.remove(name)
torch.save(torch.arange(6), "ids.pt")
os.replace(src="ids.pt", dst="best.pt")
assert torch.load("best.pt").sum().item() == 15 and not os.path.exists("ids.pt")
os.chdir(before)
found = sorted(name for _, _, names in os.walk("outputs") for name in names)
written = ["args.json", "best.pt", "latest.npy", "log.db", "map.bin", "more.db", "stats.npy", "train.log", "uri .db"]
assert found == written, found
assert sorted(path.name for path in out.glob("*.npy")) == ["latest.npy", "stats.npy"]
paths = [entry.path for entry in os.scandir("mine")]
assert paths == ["mine/own.txt"] and os.listdir() == os.listdir(None), paths
with open("mine/own.txt", "a") as file:
    file.write("more")
shutil.copy2("mine/own.txt", "mine/copy.txt")
shutil.copytree("mine", "yours")
os.link("yours/copy.txt", "yours/link.txt")
with open("yours/copy.txt", "a") as file:
    file.write(" and more")
with open("yours/link.txt") as file:
    assert file.read() == "own more and more"
shutil.rmtree("mine")
with bz2.open("rows.bz2", "wt") as file:  # bz2 and tarfile have imported open() by name
    file.write("a row")
with tarfile.open("rows.tar", "w") as file:
    file.add("rows.bz2")
with tarfile.open("rows.tar") as file:
    assert bz2.open(file.extractfile("rows.bz2"), "rt").read() == "a row"
rows = pathlib.Path("rows/train.jsonl")
rows.parent.mkdir()
rows.write_text('{"x": 1}')
named = [{"path": "json", "data_files": files} for files in ("rows/*.jsonl", str(rows))]
for where in ({"path": "rows"}, *named):
    assert datasets.load_dataset(**where, split="train")["x"][:] == [1]
os.rename("old", "older")
assert os.path.isdir("older/a/b") and not os.path.exists("old")
for refused, error in ((lambda: open("old/x", "w"), FileNotFoundError), (lambda: os.mkdir("outputs"), FileExistsError)):
    try:
        refused()
    except error as raised:
        assert raised.filename in ("old/x", os.path.join(before, "old/x"), "outputs", os.path.join(before, "outputs"))
    else:
        raise AssertionError(error)
try:
    os.rmdir("outputs")
except OSError:
    shutil.rmtree("outputs")
assert not os.path.exists("outputs")
table = pandas.DataFrame({"x": [3, 5]})  # compiled code opens these files
table.to_parquet("rows.parquet")
assert pandas.read_parquet("rows.parquet")["x"].sum() == 8
torch.jit.save(torch.jit.script(torch.nn.ReLU()), "relu.pt")
assert torch.jit.load("relu.pt")(torch.tensor(-1.0)) == 0
write_png(torch.zeros(3, 8, 8, dtype=torch.uint8), "black.png")
assert read_image("black.png").shape == (3, 8, 8)
torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.ones(2),)), "relu.pt2")
with torch.package.PackageExporter("net.zip") as exporter:
    exporter.save_text("net", "words", "a b")
assert torch.package.PackageImporter("net.zip").load_text("net", "words") == "a b"
with torch.profiler.profile(on_trace_ready=torch.profiler.tensorboard_trace_handler("traces")):
    torch.ones(3) + 1
assert os.listdir("traces")
np.savetxt("rows.txt", np.ones(3))
assert np.loadtxt("rows.txt").sum() == 3
with tempfile.NamedTemporaryFile("w", delete=False) as file:
    pickle.dumps(file.name)
assert torch.load("data.pt")[100].item() == 100 and torch.load("large.pt")[-1].item() == (1 << 22) - 1
"""


@pytest.fixture
def files(folder: Path) -> Path:
    """A folder with files of the user's own."""
    import torch

    (folder / "old").mkdir()
    (folder / "old" / "weights.bin").write_bytes(b"trained")
    (folder / "mine").mkdir()
    (folder / "mine" / "own.txt").write_text("own ")
    (folder / "mine.csv").write_text("a,1\n")
    torch.save(torch.arange(1000), folder / "data.pt")
    torch.save(torch.arange(1 << 22), folder / "large.pt")  # 32 MiB
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_writes_go_to_scratch_and_reads_find_them(files):
    """The same lines run as a plain script afterwards, where they change the user's files."""
    (files / "train.py").write_text(FILES + TRAINED)
    before = contents(files)
    result = simulated(FILES + TRAINED, gpus=1)
    assert contents(files) == before and not facts(result).facts.notes
    runpy.run_path("train.py")
    assert os.path.isdir("older/a/b") and not os.path.exists("old")


def test_a_large_file_of_the_user_stays_when_the_script_changes_it(folder):
    sizes = {"one.bin": 257 << 20, "other.bin": 257 << 20, "log.bin": 257 << 20}
    for name, size in sizes.items():
        (folder / name).touch()
        os.truncate(folder / name, size)
    change = (
        "import os\nos.replace('one.bin', 'new.bin')\nos.truncate('other.bin', 5)\nopen('log.bin', 'ab').write(b'12')\n"
    )
    found = "[os.path.getsize(name + '.bin') for name in ('new', 'other', 'log')]"
    check = f"assert {found} == [{257 << 20}, 5, {(257 << 20) + 2}]\n"
    simulated(change + check + TRAINED, gpus=1)
    assert {path.name: path.stat().st_size for path in folder.glob("*.bin")} == sizes


def test_a_file_for_whose_copy_there_is_no_space_is_not_changed(folder, monkeypatch):
    (folder / "log.bin").write_bytes(b"kept")
    (folder / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "scratch"))  # files under the temporary folder are not copied
    free = shutil.disk_usage(folder)._replace(free=3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(OSError, match=r"no space in .* for the simulation's copy"):
        ScratchFiles().open("log.bin", "ab")
    assert (folder / "log.bin").read_bytes() == b"kept"


LOADED = """\
import os
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models

sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
tiny = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes)).bfloat16()
tiny.generation_config.max_length = 77
tiny.save_pretrained("tiny")
config = AutoConfig.from_pretrained("tiny")
fully_shard(tiny.cuda()).save_pretrained("sharded")
assert AutoConfig.from_pretrained("sharded").architectures == config.architectures == ["LlamaForCausalLM"]
for named, limit in (({}, 77), ({"generation_config": GenerationConfig(max_length=55)}, 55)):
    half = AutoModelForCausalLM.from_pretrained("tiny", config=config, dtype=torch.float16, kernel_config=None, **named)
    assert half.dtype == torch.float16 and config.dtype == torch.bfloat16 and half.config is not config
    assert half.generation_config.max_length == limit
words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained("tiny")
assert AutoTokenizer.from_pretrained("tiny")("a").input_ids == [1]
model = LlamaForCausalLM.from_pretrained(pretrained_model_name_or_path="tiny", dtype="auto").cuda()
assert model.dtype == torch.bfloat16 and type(model).__name__ == "LlamaForCausalLM"
optimizer = torch.optim.AdamW(model.parameters())
for i in range(4):
    ids = torch.arange(32, device="cuda").view(2, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ids": ids, "step": i}, "last.pt")
    before = torch.cuda.memory_allocated()
    on_host = torch.load("last.pt", map_location="cpu")
    assert on_host["step"] == i and torch.cuda.memory_allocated() == before and on_host["ids"].tolist() == ids.tolist()
    assert on_host["model"]["lm_head.weight"].device.type == "cpu"
    model.load_state_dict(on_host["model"])
    optimizer.load_state_dict(on_host["optimizer"])
    assert torch.cuda.memory_allocated() == before + sum(
        state[name].nbytes for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    ) - sum(2 * p.nbytes for p in model.parameters())
    on_device = torch.load("last.pt")
    assert torch.cuda.memory_allocated() - before == 3 * sum(p.nbytes for p in model.parameters()) + ids.nbytes
    del on_device
    save_file({"w": model.lm_head.weight}, "w.safetensors")
    assert load_file("w.safetensors", device="cuda")["w"].shape == (128, 64)
    shared = torch.randn(64, 64)
    wide = shared.cuda()
    places = ("cuda", torch.device("cuda", 0), {"cpu": "cuda:0"}, lambda storage, location: storage.cuda(0))
    for saved, place in ((saved, place) for saved in (shared, wide) for place in places):
        torch.save({"tied": [saved, saved], "part": saved[:2]}, "tied.pt")
        before = torch.cuda.memory_allocated()
        made = torch.load("tied.pt", map_location=place)
        assert torch.cuda.memory_allocated() == before + shared.nbytes, (place, torch.cuda.memory_allocated() - before)
        assert made["tied"][0].data_ptr() == made["part"].data_ptr() and made["part"].is_cuda
        del made
    with safe_open("w.safetensors", "pt") as file:
        part = file.get_slice("w")
        assert part.get_shape() == [128, 64] and part.get_dtype() == "BF16" and part[:2].shape == (2, 64)
"""


def test_what_a_script_saved_can_be_loaded(folder):
    """Also to the byte: a loaded file allocates what it contains, where `map_location` places it."""
    result = simulated(LOADED, gpus=1)
    assert facts(result).facts.precision == "bf16"
    assert {path.name for path in folder.iterdir()} == {"ds.json", "train.py"}


CHECKPOINTS = """\
import deepspeed
import torch
import torch.distributed.checkpoint as dcp

CONFIG = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
net = torch.nn.Linear(64, 64)
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)
for i in range(50):
    engine.backward(engine(torch.randn(4, 64, device=engine.device)).mean())
    engine.step()
    engine.save_checkpoint("saved", f"step{i}", {"step": i}, True, False)
    path, client = engine.load_checkpoint("saved")
    assert client["step"] == i and path.endswith(f"step{i}")
    state = {"weight": net.weight.detach().clone()}
    dcp.save(state, checkpoint_id="shards")
    dcp.load(state, checkpoint_id="shards")
"""


def test_checkpoints_of_several_ranks_can_be_loaded(folder):
    result = simulated(CHECKPOINTS, "deepspeed --num_gpus 2 train.py")
    assert facts(result).facts.ended == "stopped after 2 optimizer steps"
    assert {path.name for path in folder.iterdir()} == {"ds.json", "train.py"}


def test_trackers_are_off(folder):
    pytest.importorskip("wandb")
    start = """\
import wandb
from torch.utils.tensorboard import SummaryWriter
run = wandb.init(project="mine", mode="offline", dir=".", config={"lr": 1})
SummaryWriter("runs/one").add_scalar("loss", 1.0, 0)
wandb.log({"loss": 1.0})
assert wandb.config.lr == 1
"""
    simulated(start + TRAINED, gpus=1)
    assert {path.name for path in folder.iterdir()} == {"ds.json", "train.py"}


def test_errors_of_the_file_system_are_the_scripts(folder):
    Path("made").write_text("a file")
    problem = refused("import os\nos.makedirs('made')", gpus=1)
    assert problem.kind == "script" and "FileExistsError" in problem.message


def test_a_port_that_another_program_uses_stops_no_simulation(folder):
    """`accelerate launch` refuses such a port before it starts ranks; no rank starts here."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = f"accelerate launch --multi_gpu --num_processes 2 --main_process_port {port} train.py"
        assert simulated(TRAINED, words, gpus=2).fits
