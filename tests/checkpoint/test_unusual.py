"""Files that are not as a program's own save leaves them: each is read rightly, or one line names what it is."""

from __future__ import annotations

import errno
import gzip
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from zerofit.app.checkpoints import Checkpoint
from zerofit.checkpoint.full_state import FullState
from zerofit.checkpoint.model_folder import staged_folder
from zerofit.spec.errors import UserError

WEIGHTS = {"first.weight": torch.arange(6.0).view(2, 3), "first.bias": torch.ones(3), "head.weight": torch.randn(4)}


def same(out: Path) -> bool:
    got = load_file(out / "model.safetensors")
    return got.keys() == WEIGHTS.keys() and all(torch.equal(got[name], WEIGHTS[name]) for name in got)


@pytest.mark.parametrize("end", ["safetensors", "bin"])
def test_all_shards_are_read(tmp_path, end):
    kind, save = ("model", save_file) if end == "safetensors" else ("pytorch_model", torch.save)
    parts = [{n: t for n, t in WEIGHTS.items() if n.startswith(start)} for start in ("first", "head")]
    for number, part in enumerate(parts, start=1):
        save(part, tmp_path / f"{kind}-{number:05}-of-00002.{end}")
    save_file({"layers.0.w": torch.ones(2)}, tmp_path / "consolidated.safetensors")  # the same model by other names
    (tmp_path / "consolidated.safetensors").rename(tmp_path / f"consolidated.{end}")
    Checkpoint(tmp_path).export(tmp_path / "out")
    assert same(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    lost = tmp_path / f"{kind}-00002-of-00002.{end}"
    lost.unlink()
    for work in (Checkpoint(tmp_path).describe, lambda: Checkpoint(tmp_path).export(tmp_path / "out")):
        with pytest.raises(UserError, match=f"{lost.name} is missing"):
            work()


def test_every_shard_is_verified(tmp_path):
    for number in (1, 2):
        torch.save({f"w{number}": torch.randn(3000)}, tmp_path / f"pytorch_model-{number:05}-of-00002.bin")
    assert Checkpoint(tmp_path).verify().ok
    content = bytearray((tmp_path / "pytorch_model-00002-of-00002.bin").read_bytes())
    content[len(content) // 2] ^= 4
    (tmp_path / "pytorch_model-00002-of-00002.bin").write_bytes(content)
    assert [p.file for p in Checkpoint(tmp_path).verify().problems] == ["pytorch_model-00002-of-00002.bin"]


@pytest.mark.parametrize(("place", "value"), [(8, 1), (8, 32), (10, 8), (10, 99)], ids=str)  # flags, compression
def test_a_changed_list_of_records_is_damage(tmp_path, place, value):
    torch.save(WEIGHTS, tmp_path / "state.pt")
    dcp.save(WEIGHTS, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    for file, path in ((tmp_path / "state.pt",) * 2, (tmp_path / "dcp/__0_0.distcp", tmp_path / "dcp")):
        content = bytearray(file.read_bytes())
        content[content.index(b"PK\x01\x02") + place] = value
        file.write_bytes(content)
        assert Checkpoint(path).verify().problems[0].file == file.name


@pytest.mark.parametrize(
    "content",
    [
        {f"_orig_mod.{name}": tensor for name, tensor in WEIGHTS.items()},
        {n.replace("first", "_fsdp_wrapped_module.first._checkpoint_wrapped_module"): t for n, t in WEIGHTS.items()},
        {"epoch": 3, "net": WEIGHTS, "args": {"lr": 1.0}},
        {"model_ema": {"x": torch.zeros(2)}, "model": WEIGHTS},
        {n: (t.half() if n == "first.weight" else t) for n, t in WEIGHTS.items()},  # exact in 16 bits
        {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in WEIGHTS.items()},
    ],
)
def test_state_dicts_with_the_models_names_and_numbers(tmp_path, content):
    torch.save(content, tmp_path / "state.pt")
    Checkpoint(tmp_path / "state.pt").export(tmp_path / "out")
    assert same(tmp_path / "out")


def test_tensors_without_elements_and_dimensions(tmp_path):
    content = {"empty": torch.zeros(0, 4), "scale": torch.tensor(2.5), **WEIGHTS, "c": torch.ones(2) * 1j}
    torch.save(content, tmp_path / "state.pt")
    Checkpoint(tmp_path / "state.pt").export(tmp_path / "out")
    got = load_file(tmp_path / "out/model.safetensors")
    assert got.keys() == content.keys() and all(torch.equal(got[name], content[name]) for name in got)


def test_buffers_of_safetensors_keep_their_type(tmp_path):
    buffers = {"n.num_batches_tracked": torch.tensor(2**24 + 1), "n.running_var": torch.full((3,), 1 + 2**-12)}
    save_file(WEIGHTS | buffers, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path / "model.safetensors")
    assert checkpoint.describe().parameters == sum(tensor.numel() for tensor in WEIGHTS.values())
    checkpoint.export(tmp_path / "out", dtype="bf16")
    got = load_file(tmp_path / "out/model.safetensors")
    assert got["head.weight"].dtype == torch.bfloat16
    assert all(got[n].dtype == t.dtype and torch.equal(got[n], t) for n, t in buffers.items())


def test_distributed_tensors_of_several_types(tmp_path):
    content = {"w": torch.ones(3).bfloat16(), "v": torch.full((3,), 1 + 2**-12), "n": torch.tensor(2**24 + 1)}
    content["bn.running_mean"] = torch.full((3,), 1 + 2**-12)
    dcp.save(content, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    Checkpoint(tmp_path / "dcp").export(tmp_path / "out")
    got = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(got[name], tensor.to(got[name].dtype)) for name, tensor in content.items())
    assert got["v"].dtype == torch.float32 and got["n"].dtype == torch.int64
    Checkpoint(tmp_path / "dcp").export(tmp_path / "half", dtype="bf16")
    got = load_file(tmp_path / "half/model.safetensors")
    assert {name: t.dtype for name, t in got.items() if t.dtype != torch.bfloat16} == {
        "n": torch.int64,
        "bn.running_mean": torch.float32,
    }


def save_blocks(rank: int, folder: Path, tensors: dict[str, tuple[torch.Tensor, int]]) -> None:
    """Save tensors as one of two ranks, each cut along a dimension, as FSDP2 cuts quantized weights."""
    torch.set_num_threads(1)  # in a fork, OpenMP's other threads are gone
    dist.init_process_group("gloo", init_method=f"file://{folder.parent}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    blocks = {name: distribute_tensor(tensor, mesh, [Shard(dim)]) for name, (tensor, dim) in tensors.items()}
    dcp.save(blocks, checkpoint_id=str(folder))


def test_blocks_of_integers_and_statistics_are_joined(tmp_path):
    saved = {"head.weight": (torch.randn(5, 4), 0), "codes": (torch.randint(255, (7, 6), dtype=torch.uint8), 0)}
    saved |= {"columns": (torch.randint(99, (4, 5)), 1), "norm.running_mean": (torch.randn(9), 0)}
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=save_blocks, args=(rank, tmp_path / "dcp", saved)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    Checkpoint(tmp_path / "dcp").export(tmp_path / "out")
    got = load_file(tmp_path / "out/model.safetensors")
    assert all(got[name].dtype == t.dtype and torch.equal(got[name], t) for name, (t, _) in saved.items())


def test_a_distributed_checkpoint_without_weights_is_refused(tmp_path):
    dcp.save({"n": torch.tensor([5, 6])}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    with pytest.raises(UserError, match="it has no tensors"):
        Checkpoint(tmp_path / "dcp").export(tmp_path / "out")


def test_numbers_of_8_bits_next_to_others(tmp_path):
    weights = {"w": torch.tensor([1.0, 3.0]).to(torch.float8_e4m3fn), "v": torch.ones(2).bfloat16()}
    save_file(weights, tmp_path / "model.safetensors")
    Checkpoint(tmp_path / "model.safetensors").export(tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors")["w"].dtype == torch.bfloat16
    assert Checkpoint(tmp_path / "model.safetensors").diff(tmp_path / "out").equal


def test_names_that_modules_have_too(tmp_path):
    content = {name: torch.ones(2) for name in ("type.weight", "half", "a", "a.b", "training.x")}
    torch.save(content, tmp_path / "state.pt")
    Checkpoint(tmp_path / "state.pt").export(tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == content.keys()


def test_a_link_to_an_empty_folder_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    Checkpoint(tmp_path / "model.safetensors").export(tmp_path / "out")
    assert same(tmp_path / "disk") and (tmp_path / "out").is_symlink()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2)}}, r"several state dicts \(a, b\)"),
        ({"w": torch.ones(2, device="meta")}, "w has no data"),
        ({"w": torch.eye(2).to_sparse()}, "w is sparse"),
        ({"w": torch.nn.Linear(2, 2)}, r"contains torch\.nn\.modules\.linear\.Linear, which could run code"),
        ([torch.ones(2)], "no tensors"),
        ({0: torch.ones(2)}, "its tensors have no names, but keys like 0"),
    ],
)
def test_state_dicts_that_are_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "state.pt")
    with pytest.raises(UserError, match=message):
        Checkpoint(tmp_path / "state.pt").describe()
    assert not Checkpoint(tmp_path / "state.pt").verify().ok


def archive(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("storages"))


def script(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("m/constants.pkl", b"")


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("m.gguf", lambda path: path.write_bytes(b"GGUF\x03\0\0\0"), "GGUF file; convert it with"),
        ("m.h5", lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n"), "HDF5"),
        ("m.npz", lambda path: numpy.savez(path, a=numpy.ones(2)), "NumPy"),
        ("state.pt", lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        ("model.safetensors", lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "lfs pull"),
        ("state.pt", lambda path: path.write_text("<!doctype html>404"), "web page"),
        ("state.pt", lambda path: path.write_bytes(gzip.compress(b"x")), "gzip archive; unpack"),
        ("state.pt", archive, "tar archive; unpack"),
        ("state.pt", script, "TorchScript"),
        ("0/_CHECKPOINT_METADATA", lambda path: path.write_text("{}"), "Orbax"),
        ("flax_model.msgpack", lambda path: path.write_bytes(b"x"), "Flax"),
        ("m.data-00000-of-00001", lambda path: path.write_bytes(b"x"), "TensorFlow"),
        ("m.onnx", lambda path: path.write_bytes(b"\x08\x07"), "ONNX"),
        ("adapter_config.json", lambda path: path.write_text("{}"), "peft's adapters: `ckpt export PATH OUT --merge`"),
    ],
)
def test_other_formats_are_named(tmp_path, name, write, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    write(path)
    of_folder = message in ("Orbax", "Flax", "TensorFlow") or path.suffix == ".json"
    with pytest.raises(UserError, match=message):
        Checkpoint(tmp_path if of_folder else path).describe()


def test_links_are_followed(written, tmp_path):
    """As in the cache of Hugging Face's hub, or where a full disk made somebody move a folder."""
    saved = tmp_path / "saved"
    shutil.copytree(written[2], saved)
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted((saved / "global_step1").iterdir())):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(tmp_path / "blobs" / str(number))
    (saved / "global_step1").rename(tmp_path / "elsewhere")
    (saved / "global_step1").symlink_to(tmp_path / "elsewhere")
    ours, theirs = FullState(written[2]), FullState(saved)
    assert all(torch.equal(theirs.read(name, "exp_avg"), ours.read(name, "exp_avg")) for name in ours.names)
    assert Checkpoint(saved).verify().ok


def test_files_of_two_runs_in_one_folder(written, tmp_path):
    saved = tmp_path / "saved"
    shutil.copytree(written[2], saved)
    shutil.copytree(written[3], saved, dirs_exist_ok=True)
    assert {p.kind for p in Checkpoint(saved).verify().problems} == {"mixed"}


def test_a_pipe_does_not_block(written, tmp_path):
    shutil.copytree(written[2], tmp_path / "saved")
    os.mkfifo(tmp_path / "saved/global_step1/pipe.pt")
    assert Checkpoint(tmp_path / "saved").verify().ok


@pytest.mark.parametrize("name", ["global_step5.pt", "x" * 5000, "a\0b"])
def test_a_damaged_latest_file_is_named(written, tmp_path, name):
    saved = shutil.copytree(written[2], tmp_path / "saved")
    (saved / "latest").write_text(name)
    assert [(p.file, p.kind) for p in Checkpoint(saved).verify().problems] == [("latest", "misplaced")]


def test_the_newest_of_several_files_is_read(tmp_path):
    for step in (5, 10, 20):
        torch.save({"w": torch.full((2,), float(step))}, tmp_path / f"epoch=0-step={step}.ckpt")
    assert FullState(tmp_path).read("w").tolist() == [20, 20]
    assert Checkpoint(tmp_path).describe().step == 20


def test_the_named_one_of_several_universal_checkpoints_is_read(tmp_path):
    for step in (5, 9, 12):
        folder = tmp_path / f"global_step{step}_universal/zero/w"
        folder.mkdir(parents=True)
        torch.save({"param": torch.full((2,), float(step))}, folder / "fp32.pt")
    assert [entry.step for entry in Checkpoint.list(tmp_path).checkpoints] == [5, 9, 12]
    assert Checkpoint(tmp_path).describe().step == 12
    (tmp_path / "latest_universal").write_text("global_step9_universal")
    path = Checkpoint.latest(tmp_path).path
    assert FullState(path).read("w").tolist() == [9, 9] and Checkpoint(path).verify().ok


@pytest.mark.parametrize("stage", [1, 3])
def test_all_stages_of_a_universal_pipeline_keep_their_optimizer_states(tmp_path, stage):
    """As DeepSpeed's ds_to_universal.py writes it: the file of each stage lists only its own parameters."""
    step, wanted = tmp_path / "universal/step", dict[str, torch.Tensor]()
    for rank, layers in enumerate([(1, 2), (4,)]):
        shapes = {f"{layer}.{name}": size for layer in layers for name, size in (("weight", (4, 3)), ("bias", (4,)))}
        for name, size in shapes.items():
            (step / "zero" / name).mkdir(parents=True)
            for kind in ("fp32", "exp_avg", "exp_avg_sq"):
                torch.save({"param": torch.rand(size)}, step / f"zero/{name}/{kind}.pt")
            torch.save(torch.tensor(3.0), step / f"zero/{name}/step.pt")
            wanted[name] = torch.load(step / f"zero/{name}/exp_avg.pt")["param"]
        listed = [{name: torch.Size(size) for name, size in shapes.items()}]
        torch.save({"module": None, "param_shapes": listed}, step / f"mp_rank_{rank:02}_model_states.pt")
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    torch.save({"param_groups": [group]}, step / "zero/optimizer_state.pt")
    Checkpoint(step).convert(tmp_path / "out", to="deepspeed", ranks=2, stage=stage)
    found = FullState(tmp_path / "out")
    assert [group.names for group in found.groups] == [list(wanted)]
    assert all(torch.equal(found.read(name, "exp_avg"), value) for name, value in wanted.items())


def test_a_universal_checkpoint_by_zerofit_is_read_again(written, tmp_path):
    """Its folder has the name of a run's checkpoint, and the files of an engine's model states."""
    Checkpoint(written[2]).convert(tmp_path / "universal")
    assert "universal" in Checkpoint(tmp_path / "universal").describe().name
    assert Checkpoint(tmp_path / "universal").verify().ok
    ours, theirs = FullState(written[2]), FullState(tmp_path / "universal")
    for name in ours.names:
        assert all(torch.equal(theirs.read(name, kind), ours.read(name, kind)) for kind in ("fp32", "exp_avg"))


@pytest.mark.parametrize("nested", [False, True])  # as newer releases save them
def test_states_that_belong_to_no_parameter_are_not_left_out_silently(tmp_path, nested):
    """As bitsandbytes saves them: 8 bits, with other shapes."""
    codes = {"state1": torch.zeros(6, dtype=torch.uint8), "qmap1": torch.zeros(256)}
    state = {"step": 1, **({"__bnb_optimizer_quant_state__": codes} if nested else codes)}
    optimizer = {"state": dict.fromkeys(range(3), state), "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}
    torch.save({"model": WEIGHTS, "optimizer": optimizer}, tmp_path / "state.pt")
    for how in ({"to": "universal"}, {"to": "deepspeed", "ranks": 2, "stage": 2}, {"to": "dcp"}):
        with pytest.raises(UserError, match="only the optimizer that wrote"):
            Checkpoint(tmp_path / "state.pt").convert(tmp_path / "out", **how)
    opened = FullState(tmp_path / "state.pt")  # a resume prints the notes; a new optimizer begins with step 0
    assert (
        "bitsandbytes" in opened.notes[0] and opened.counters["step"] is None and opened.counters["global_steps"] == 1
    )
    Checkpoint(tmp_path / "state.pt").export(tmp_path / "hf")
    assert same(tmp_path / "hf")


@pytest.mark.parametrize("to", ["hf", "dcp", "universal", "deepspeed 1", "deepspeed 3"])
def test_a_disk_that_becomes_full_is_an_error_in_words(tmp_path, to):
    """A limit for the size of files stands for it: the system refuses the same calls."""
    model = torch.nn.Linear(100, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    form, _, stage = to.partition(" ")
    how = {"to": form, **({"ranks": 1, "stage": int(stage)} if stage else {})}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(UserError, match="out cannot be written: File too large"):
            Checkpoint(tmp_path / "state.pt").convert(tmp_path / "out", **how)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "out").exists()
    Checkpoint(tmp_path / "state.pt").convert(tmp_path / "out", **how)
    assert torch.equal(FullState(tmp_path / "out").read("weight"), model.weight)
    assert {path.name for path in tmp_path.iterdir()} == {"state.pt", "out"}


def test_a_full_disk_keeps_complete_files_only_and_names_their_folder(tmp_path):
    staging = tmp_path / ".out.writing"
    with pytest.raises(UserError) as refused, staged_folder(tmp_path / "out", plan={"to": "universal"}) as folder:
        (folder / "complete.pt").write_bytes(bytes(9))
        (folder / ".scratch").write_bytes(bytes(9))  # would keep the full disk full
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert {path.name for path in staging.iterdir()} == {".plan.json", "complete.pt"}
    assert str(staging) in refused.value.problems[0].hint


def test_a_killed_export_leaves_nothing_for_the_next_one(tmp_path):
    out, staging = tmp_path / "out", tmp_path / ".out.writing"
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    if not (child := os.fork()):
        with staged_folder(out) as folder:
            (folder / "model-00009-of-00009.safetensors").write_bytes(bytes(9))
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert any(staging.iterdir()) and not out.exists()
    with staged_folder(out), pytest.raises(UserError, match="another process is writing"):
        Checkpoint(tmp_path / "model.safetensors").export(out)
    shutil.rmtree(out)
    Checkpoint(tmp_path / "model.safetensors").export(out)
    assert same(out) and not staging.exists() and not list(out.glob("model-*"))


def test_a_folder_that_cannot_be_replaced_gets_the_files(tmp_path):
    out = tmp_path / "out"
    (out / "lost+found").mkdir(parents=True)  # as in the root of an ext4 file system
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    with pytest.raises(UserError), staged_folder(out, plan={"to": "hf"}) as folder:
        (folder / "complete.pt").write_bytes(bytes(9))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert (out / ".writing/complete.pt").is_file()  # of another plan: removed by the next call
    Checkpoint(tmp_path / "model.safetensors").export(out)
    assert same(out) and not {path.name for path in out.iterdir()} & {".writing", "complete.pt"}
    with pytest.raises(UserError, match="already exists"):
        Checkpoint(tmp_path / "model.safetensors").export(out)


@pytest.mark.root
def test_the_root_of_a_file_system_gets_the_files(tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    (tmp_path / "out").mkdir()
    code = "from zerofit.app.checkpoints import Checkpoint; Checkpoint('model.safetensors').export('out')"
    shell = f'mount -t tmpfs none out && "{sys.executable}" -c "{code}" && cp -r out copy'
    done = subprocess.run(["unshare", "--mount", "sh", "-c", shell], cwd=tmp_path, capture_output=True, text=True)
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip("cannot mount here")
    assert same(tmp_path / "copy"), done.stderr


def test_files_without_permission_are_named(tmp_path, monkeypatch):
    """Root may read every file, so the system's answer is simulated."""
    model = torch.nn.Linear(2, 2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    real = os.open

    def refused(path, *more, **how):
        if str(path).endswith((".distcp", ".pt")):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *more, **how)

    monkeypatch.setattr(os, "open", refused)
    for path, name in ((tmp_path / "dcp", "__0_0.distcp"), (tmp_path / "state.pt", "state.pt")):
        problem = Checkpoint(path).verify().problems[0]
        assert (problem.file, problem.kind, problem.message) == (name, "unreadable", "Permission denied")
