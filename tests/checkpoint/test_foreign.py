"""Checkpoints of other programs are read by the metadata in their files: names, values, states, damage."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from zerofit.app.checkpoints import Checkpoint
from zerofit.checkpoint import safe_load
from zerofit.checkpoint.full_state import FullState
from zerofit.spec.errors import UserError


def plain(runs, name: str, folder: Path) -> tuple[Path, Path]:
    """The files that DeepSpeed's engine wrote in a run, as a plain program leaves them; and the run's checkpoint."""
    own = sorted(runs(name).folder.checkpoints.glob("step-*"))[-1]
    shutil.copytree(own / "state", folder / "saved" / "global_step3")
    (folder / "saved" / "latest").write_text("global_step3")
    for file in folder.glob("saved/*/*.pt"):  # with checksums, which runs leave out
        torch.save(torch.load(file, weights_only=False), file)
    return folder / "saved", own


@pytest.mark.parametrize("run", ["zero2", "zero3-bf16", "images"])
def test_deepspeeds_files_have_the_names_and_values_of_the_runs_own_index(runs, tmp_path, run):
    saved, own = plain(runs, run, tmp_path)
    theirs, ours = FullState(saved), FullState(own)
    assert sorted(theirs.names) == sorted(ours.names) and sorted(theirs.buffers) == sorted(ours.buffers)
    assert theirs.ties == ours.ties and theirs.notes == []
    for name in ours.names:
        assert theirs.shape(name) == ours.shape(name)
        assert set(theirs.kinds(name)) == set(ours.kinds(name)) >= {"fp32", "exp_avg", "exp_avg_sq"}
        for kind in ours.kinds(name):
            assert torch.equal(theirs.read(name, kind), ours.read(name, kind)), (name, kind)
    for counter in ("step", "global_steps", "global_samples"):
        assert theirs.counters[counter] == ours.counters[counter] > 0


def test_shares_of_tensor_parallel_ranks_are_refused(runs, tmp_path):
    saved, _ = plain(runs, "tp-tied", tmp_path)
    with pytest.raises(UserError, match="tensor parallel"):
        FullState(saved)


def trained_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def distributed(tmp_path) -> Path:
    model, optimizer = trained_model()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    return tmp_path / "dcp"


def test_distributed_checkpoints_of_torch(distributed):
    model, optimizer = trained_model()
    state = FullState(distributed)
    assert state.counters["step"] == 3
    assert sorted(state.names) == sorted(n for n in model.state_dict() if "num_batches" not in n)
    for name, parameter in model.named_parameters():
        assert torch.equal(state.read(name), parameter)
        assert torch.equal(state.read(name, "exp_avg_sq"), optimizer.state[parameter]["exp_avg_sq"])


def test_state_dicts_in_a_file(tmp_path):
    model, optimizer = trained_model()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    state = FullState(tmp_path / "state.pt")
    assert torch.equal(state.read("2.weight"), model[2].weight)
    assert torch.equal(state.read("1.running_mean"), model[1].running_mean)
    assert torch.equal(state.read("2.weight", "exp_avg"), optimizer.state[model[2].weight]["exp_avg"])
    assert state.notes == [] and state.counters["step"] == 3


def test_no_pickle_runs(distributed, tmp_path):
    for value in (Touch(tmp_path / "ran"), {"storage_data": Touch(tmp_path / "ran")}):
        (distributed / ".metadata").write_bytes(pickle.dumps(value))
        with pytest.raises(UserError, match="could run code"):
            FullState(distributed)
    torch.save({"model": Touch(tmp_path / "ran")}, tmp_path / "state.pt")
    with pytest.raises(UserError, match="could run code"):
        FullState(tmp_path / "state.pt")
    assert not (tmp_path / "ran").exists()
    with safe_load.trusted_pickles(True):
        safe_load.load(tmp_path / "state.pt")
    assert (tmp_path / "ran").exists()


class Touch:
    """A pickle that creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def lose_rank(saved: Path) -> None:
    next(saved.glob("*/*pp_rank_1_*optim_states.pt")).unlink()


def truncate(saved: Path) -> None:
    file = next(saved.glob("*/*pp_rank_1_*optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-300])


def flip(saved: Path) -> None:
    file = next(saved.glob("*/*pp_rank_1_*optim_states.pt"))
    content = bytearray(file.read_bytes())
    place = content.index(b"/data/0FB")  # the record's header; its data come within 64 bytes
    content[place + 200] ^= 16
    file.write_bytes(content)


def other_step(saved: Path) -> None:
    file = next(saved.glob("*/*pp_rank_1_*optim_states.pt"))
    content = torch.load(file, weights_only=False)
    saved_state = content["optimizer_state_dict"]
    for state in (saved_state.get("base_optimizer_state") or saved_state["optimizer_state_dict"])["state"].values():
        state["step"] += 1
    torch.save(content, file)


def half_written(saved: Path) -> None:
    (saved / "global_step4").mkdir()
    (saved / "latest").write_text("global_step4")


DAMAGE = {lose_rank: "missing", truncate: "truncated", flip: "changed", other_step: "mixed", half_written: "misplaced"}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("run", ["zero2", "zero3-bf16"])
def test_damage_is_named(runs, tmp_path, run, damage):
    saved, _ = plain(runs, run, tmp_path)
    assert Checkpoint(saved).verify().problems == []
    damage(saved)
    problems = Checkpoint(saved).verify().problems
    assert {problem.kind for problem in problems} == {DAMAGE[damage]}
    where = "latest" if damage is half_written else "pp_rank_1_mp_rank_00_optim_states.pt"
    assert any(where in problem.file for problem in problems)


def test_a_rank_of_another_run_has_other_weights(runs, tmp_path):
    saved, _ = plain(runs, "zero2", tmp_path)
    file = next(saved.glob("*/*pp_rank_1_*optim_states.pt"))
    content = torch.load(file, weights_only=False)
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data.add_(1)
    torch.save(content, file)
    (problem,) = Checkpoint(saved).verify().problems
    assert problem.kind == "mixed" and "differs from its weights in" in problem.message


def test_what_it_is(runs, tmp_path):
    saved, _ = plain(runs, "zero3-bf16", tmp_path)
    assert Checkpoint(saved).describe().name == "a checkpoint by DeepSpeed: ZeRO-3, 2 ranks, step 3"
    (row,) = Checkpoint.list(saved).checkpoints
    assert (row.step, row.world_size, row.layout.zero_stage, row.problems) == (3, 2, 3, [])
