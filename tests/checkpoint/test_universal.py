"""Universal checkpoints against those that DeepSpeed's own converter makes of the same files.

benchmarks/export_matrix.py loads them into plain DeepSpeed engines at stages 1, 2 and 3, on one rank and on two.
"""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from zerofit.checkpoint.store import locate
from zerofit.checkpoint.universal import convert


def load(path):
    return torch.load(path, weights_only=False)  # what the converter writes holds a loss scaler


@pytest.mark.versions
@pytest.mark.parametrize("name", ["zero2", "zero3-bf16"])
def test_as_deepspeed_converts_it(runs, name, tmp_path):
    from deepspeed.checkpoint import ds_to_universal

    checkpoint = locate(runs(name).folder.path)
    done = convert(checkpoint, tmp_path / "ours")
    assert (tmp_path / "ours" / "latest_universal").read_text() == done.tag == "step-00000003"
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(checkpoint / "state"), "output_folder": str(tmp_path / "theirs" / "step")}
    (tmp_path / "theirs" / "step").mkdir(parents=True)
    ds_to_universal.main(Namespace(**options, **folders, inject_missing_state=True))

    ours, theirs = tmp_path / "ours" / done.tag, tmp_path / "theirs" / "step"
    files = {p.relative_to(theirs) for p in theirs.rglob("*.pt")}
    assert files - {p.relative_to(ours) for p in ours.rglob("*.pt")} <= {f for f in files if "pp_rank_1" in f.name}
    tensors = [f for f in files if f.name in ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt")]
    assert len(tensors) == 3 * 21
    for file in tensors:
        mine, other = load(ours / file)["param"], load(theirs / file)
        other = other["param"] if isinstance(other, dict) else other
        assert torch.equal(mine.view(-1), other.view(-1)), file
    steps = [f for f in files if f.name == "step.pt"]
    assert all(load(ours / f) == load(theirs / f) for f in steps)
    mine, other = (load(folder / "zero" / "optimizer_state.pt") for folder in (ours, theirs))
    assert all(mine.get(key) == other.get(key) for key in ("overflow", "zero_stage"))
    assert other["loss_scaler"].cur_scale == 1 and "loss_scaler" not in mine  # an engine in fp16 keeps its own scale
    for one, two in zip(mine["param_groups"], other["param_groups"], strict=True):
        assert one == {key: value for key, value in two.items() if key != "params"}
    states = [f for f in files if f.name.endswith("model_states.pt") and "pp_rank_1" not in f.name]
    for file in states:
        mine, other = load(ours / file), load(theirs / file)
        assert all(mine[key] == other[key] for key in ("global_steps", "skipped_steps", "lr_scheduler"))
