"""What `verify` advises about lost optimizer files is tried on a checkpoint with exactly that damage."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from zerofit.app.checkpoints import Checkpoint
from zerofit.checkpoint.full_state import FullState
from zerofit.spec.errors import UserError

RANK_1 = "*pp_rank_1_*optim_states.pt"
EXPERTS = {"num_experts": [2]}


def change(saved, **content) -> None:
    for file in saved.glob("*/*model_states.pt"):
        torch.save(torch.load(file, weights_only=False) | content, file)


@pytest.mark.parametrize(
    ("stage", "lost", "more", "advice"),
    [
        (1, RANK_1, "", "--repair"),
        (2, RANK_1, "", "--repair"),
        (2, "*optim_states.pt", "", "ckpt export"),
        (2, RANK_1, "experts", None),
        (2, RANK_1, "no weights", None),
        (3, RANK_1, "copy", "--repair"),
        (3, "*optim_states.pt", "copy", "ckpt export"),
        (3, RANK_1, "", None),
        (3, "*optim_states.pt", "", None),
        (3, RANK_1, "copy of another model", None),
    ],
)
def test_the_advice_works(written, tmp_path, stage, lost, more, advice):
    saved, weights = tmp_path / "saved", FullState(written[stage])
    shutil.copytree(written[stage], saved)
    full = {name: weights.read(name) for name in weights.names}
    if more.startswith("copy"):
        torch.save(full if more == "copy" else {"other": torch.ones(2)}, saved / "pytorch_model.bin")
    if more in ("experts", "no weights"):
        change(saved, **(EXPERTS if more == "experts" else {"module": None}))
    for file in saved.glob(f"*/{lost}"):
        file.unlink()
    (message, *_) = [p.message for p in Checkpoint(saved).verify().problems if p.file.endswith("optim_states.pt")]
    assert [text for text in ("--repair", "ckpt export") if text in message] == ([advice] if advice else [])
    result = export(saved, tmp_path / "out", repair=advice != "ckpt export")
    assert result == ({name: tensor.tolist() for name, tensor in full.items()} if advice else None)
    how = {"to": "deepspeed", "ranks": 1, "stage": 1, "repair": True}
    if advice == "--repair":
        Checkpoint(saved).convert(tmp_path / "converted", **how)
        Checkpoint(saved).convert(tmp_path / "universal", to="universal", repair=True)
        for written_again in (tmp_path / "converted", tmp_path / "universal"):
            assert all(torch.equal(FullState(written_again).read(name), full[name]) for name in full)
    else:
        with pytest.raises(UserError, match=r"no optimizer states|is not complete"):
            Checkpoint(saved).convert(tmp_path / "converted", **how)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_lost_parameters_are_named(written, tmp_path, rank):
    """DeepSpeed splits each group, matrices and vectors, over both ranks."""
    saved = shutil.copytree(written[2], tmp_path / "saved")
    (file,) = saved.glob(f"*/*pp_rank_{rank}_*optim_states.pt")
    groups = torch.load(file, weights_only=False)["optimizer_state_dict"]["param_slice_mappings"]
    file.unlink()
    (problem,) = Checkpoint(saved).verify().problems
    ranges = ", ".join(f"{names[0]} to {names[-1]}" for names in map(list, groups))
    assert f"are lost ({ranges})" in problem.message


def export(saved, out, repair):
    try:
        Checkpoint(saved).export(out, repair=repair)
    except UserError:
        return None
    return {name: tensor.tolist() for name, tensor in load_file(out / "model.safetensors").items()}
