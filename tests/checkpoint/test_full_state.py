"""The whole model out of files and indexes made by hand, and what is said of those that do not add up."""

from __future__ import annotations

import copy
import json
from itertools import product
from pathlib import Path

import pytest
import torch

from zerofit.checkpoint import full_state, safe_load
from zerofit.checkpoint.full_state import FullState
from zerofit.checkpoint.index import TensorSlice
from zerofit.spec.errors import UserError

torch.manual_seed(0)
EMBED, QKV, BIAS, MEAN = torch.randn(5, 3), torch.randn(6, 4), torch.randn(7), torch.randn(4)
COUNTERS = {"step": 2, "global_steps": 2}


def where(file: str, key: str, offset: int) -> dict:
    return {"file": file, "keys": ["flat", key], "offset": offset}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """Two ranks. `embed` is cut in the midst of a row; `qkv` is three stacked matrices, of which each rank has the
    columns' half of each (tensor parallel); `bias` is on rank 1 alone; each rank has its own mean of the batch."""
    (tmp_path / "ranks").mkdir()
    halves = [torch.cat([QKV[0:1], QKV[2:3], QKV[4:5]]), torch.cat([QKV[1:2], QKV[3:4], QKV[5:6]])]
    flats = [
        torch.cat([EMBED.reshape(-1)[:8], halves[0].reshape(-1), torch.full((2,), 9.0)]),
        torch.cat([EMBED.reshape(-1)[8:], halves[1].reshape(-1), BIAS]),
    ]
    for rank, flat in enumerate(flats):
        file, start, numel = f"state/rank_{rank}.pt", *((0, 8) if rank == 0 else (8, 7))
        (tmp_path / "state").mkdir(exist_ok=True)
        torch.save({"flat": {"fp32": flat, "exp_avg": (2 * flat).bfloat16()}}, tmp_path / file)
        torch.save({"buffers": {"mean": MEAN + rank, "count": torch.tensor(3)}}, tmp_path / f"ranks/rank-{rank:05}.pt")
        cut = {"dim": 0, "ranges": [[rank, 1], [2 + rank, 1], [4 + rank, 1]]}

        def entry(name, shape, start, numel, offset, cut=None, file=file):
            kinds = {kind: where(file, kind, offset) for kind in ("fp32", "exp_avg")}
            return {"name": name, "shape": shape, "cut": cut, "start": start, "numel": numel, "where": kinds}

        parameters = [entry("embed", [5, 3], start, numel, 0), entry("qkv", [6, 4], 0, 12, numel, cut)]
        parameters += [entry("bias", [7], 0, 7, 19)] if rank == 1 else []
        own = f"ranks/rank-{rank:05}.pt"
        engine = {
            "unsupported": None,
            "names": ["embed", "qkv", "bias"],
            "parameters": parameters,
            "buffers": [{"name": n, "file": own, "keys": ["buffers", n]} for n in ("mean", "count")],
            "ties": {"head": "embed"},
            "counters": COUNTERS,
        }
        index = {"world_size": 2, "engines": {"state": engine}}
        (tmp_path / f"ranks/rank-{rank:05}.json").write_text(json.dumps(index))
    return tmp_path


def test_whole_tensors(checkpoint):
    whole = FullState(checkpoint)
    assert whole.names == ["embed", "qkv", "bias"]
    assert whole.ties == {"head": "embed"} and whole.counters == COUNTERS
    for name, tensor in (("embed", EMBED), ("qkv", QKV), ("bias", BIAS), ("head", EMBED)):
        assert whole.shape(name) == tuple(tensor.shape) and whole.kinds(name) == ["fp32", "exp_avg"]
        assert torch.equal(whole.read(name), tensor)
        moment = whole.read(name, "exp_avg")
        assert moment.dtype == torch.float32 and torch.equal(moment, (2 * tensor).bfloat16().float())


@pytest.mark.parametrize("name,tensor", [("embed", EMBED), ("qkv", QKV)])
@pytest.mark.parametrize("start,numel", [(0, 15), (3, 2), (7, 2), (8, 4), (14, 1), (5, 0)])
def test_a_stretch(checkpoint, name, tensor, start, numel):
    expected = tensor.reshape(-1)[start : start + numel]
    assert torch.equal(FullState(checkpoint).read_flat(name, "fp32", start, numel), expected)


def test_buffers_are_the_mean_over_ranks(checkpoint):
    whole = FullState(checkpoint)
    assert whole.buffers == ["mean", "count"]
    torch.testing.assert_close(whole.buffer("mean"), MEAN + 0.5)
    assert whole.buffer("count").tolist() == 3


def test_equal_buffers_are_not_rounded(checkpoint):
    numbers = torch.randn(100, dtype=torch.float64)  # a mean of three would be rounded
    torch.save({"x": numbers}, checkpoint / "state/extra.pt")
    file = checkpoint / "ranks/rank-00001.json"
    index = json.loads(file.read_text())
    index["engines"]["state"]["buffers"] += [{"name": "x", "file": "state/extra.pt", "keys": ["x"]}] * 3
    file.write_text(json.dumps(index))
    assert torch.equal(FullState(checkpoint).buffer("x"), numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_of_bare_numbers(checkpoint, dtype):
    """As DeepSpeed swaps them out to NVMe: padded to whole blocks."""
    swapped = torch.cat([torch.zeros(2), BIAS, torch.zeros(500)]).to(dtype)
    (checkpoint / "state/0_12.tensor.swp").write_bytes(swapped.view(torch.uint8).numpy().tobytes())
    file = checkpoint / "ranks/rank-00001.json"
    index = json.loads(file.read_text())
    place = {"file": "state/0_12.tensor.swp", "keys": [], "offset": 2, "raw": str(dtype).removeprefix("torch.")}
    index["engines"]["state"]["parameters"][2]["where"]["exp_avg"] = place
    file.write_text(json.dumps(index))
    assert torch.equal(FullState(checkpoint).read("bias", "exp_avg"), BIAS.to(dtype).float())
    (checkpoint / "state/0_12.tensor.swp").unlink()
    assert kind(lambda: FullState(checkpoint).read("bias", "exp_avg")) == "incomplete-checkpoint"


def drop_piece(index):
    del index["engines"]["state"]["parameters"][0]


def overlap(index):
    index["engines"]["state"]["parameters"][0]["start"] -= 1


def twice(index):
    index["engines"]["state"]["parameters"].append(copy.deepcopy(index["engines"]["state"]["parameters"][2]))


def other_share(index):
    index["engines"]["state"]["parameters"][1]["cut"]["ranges"][0] = [0, 1]


def no_moment(index):
    del index["engines"]["state"]["parameters"][0]["where"]["exp_avg"]


@pytest.mark.parametrize("harm", [drop_piece, overlap, twice, other_share, no_moment])
def test_every_element_exactly_once(checkpoint, harm):
    file = checkpoint / "ranks/rank-00001.json"
    index = json.loads(file.read_text())
    harm(index)
    file.write_text(json.dumps(index))
    assert kind(lambda: FullState(checkpoint)) == "incomplete-checkpoint"


def test_an_index_that_is_missing(checkpoint):
    (checkpoint / "ranks/rank-00001.json").unlink()
    assert kind(lambda: FullState(checkpoint)) == "incomplete-checkpoint"
    (checkpoint / "ranks/rank-00000.json").unlink()
    assert kind(lambda: FullState(checkpoint)) == "incomplete-checkpoint"
    assert kind(lambda: FullState(checkpoint, {"generator": ""})) == "incomplete-checkpoint"


@pytest.mark.parametrize(
    "change", [{"keys": ["flat", "none"]}, {"keys": ["flat"]}, {"offset": 20}, {"file": "../elsewhere.pt"}]
)
def test_an_index_that_points_nowhere(checkpoint, change):
    file = checkpoint / "ranks/rank-00001.json"
    index = json.loads(file.read_text())
    index["engines"]["state"]["parameters"][2]["where"]["fp32"] |= change
    file.write_text(json.dumps(index))
    assert kind(lambda: FullState(checkpoint).read("bias")) == "incomplete-checkpoint"


def test_files_that_are_damaged(checkpoint):
    whole = FullState(checkpoint)
    (checkpoint / "state/rank_1.pt").write_bytes(b"PK")
    assert kind(lambda: whole.read("bias")) == "damaged-file"
    (checkpoint / "ranks/rank-00001.json").write_text("{")
    assert kind(lambda: FullState(checkpoint)) == "incomplete-checkpoint"


def test_a_layout_without_a_view_of_the_whole(checkpoint):
    file = checkpoint / "ranks/rank-00000.json"
    index = json.loads(file.read_text())
    index["engines"]["state"] |= {"unsupported": "its states are elsewhere", "parameters": []}
    file.write_text(json.dumps(index))
    assert kind(lambda: FullState(checkpoint)) == "no-whole-view"


def kind(work) -> str:
    with pytest.raises(UserError) as error:
        work()
    return error.value.problems[0].kind


def test_shares_of_stacked_matrices_make_up_the_whole():
    """Of four experts' (two halves of rows) each of two ranks has two, each half in a parameter of its own."""
    whole = torch.arange(4 * 6 * 5).view(4, 6, 5)
    put = torch.zeros_like(whole)
    for rank, half in product(range(2), range(2)):
        rows = tuple((expert * 6 + half * 3, 3) for expert in (2 * rank, 2 * rank + 1))
        share = TensorSlice(0, rows, joined=1)
        taken = share.take(whole)
        assert torch.equal(taken.view(2, 3, 5), whole[2 * rank : 2 * rank + 2, 3 * half : 3 * half + 3])
        assert share.shape((4, 6, 5)) == tuple(taken.shape)
        share.put(put, taken)
    assert torch.equal(put, whole)
    assert share.length((4, 6, 5)) == 24


@pytest.mark.parametrize("piece", [4, 40, 1 << 20])  # bytes read at once: an element, less than a row, everything
@pytest.mark.parametrize(
    "cuts",
    [
        [TensorSlice(0, ((0, 1),)), TensorSlice(0, ((1, 3),))],
        [TensorSlice(1, ((0, 2), (3, 1))), TensorSlice(1, ((2, 1), (4, 2)))],
        [TensorSlice(2, ((1, 4),)), TensorSlice(2, ((0, 1),))],
        [TensorSlice(0, ((0, 5), (12, 6)), joined=1), TensorSlice(0, ((5, 7), (18, 6)), joined=1)],
    ],
)
def test_any_part_of_shares_is_read_without_the_rest(tmp_path, monkeypatch, cuts, piece):
    """Each share has two stretches; the elements that are read are those of the part."""
    monkeypatch.setattr(full_state, "PIECE", piece)
    whole = torch.randn(4, 6, 5)
    (tmp_path / "ranks").mkdir()
    parameters = []
    for number, cut in enumerate(cuts):
        share = cut.take(whole).reshape(-1)
        for start, end in ((0, 7), (7, len(share))):
            file = f"{number}-{start}.pt"
            torch.save({"flat": {"fp32": share[start:end].clone()}}, tmp_path / file)
            places = {"fp32": where(file, "fp32", 0)}
            shard = {"name": "w", "shape": [4, 6, 5], "cut": vars(cut), "start": start, "numel": end - start}
            parameters.append(shard | {"where": places})
    engine = {"names": ["w"], "parameters": parameters, "buffers": [], "ties": {}, "counters": {}, "unsupported": None}
    index = {"world_size": 1, "engines": {"state": engine}}
    (tmp_path / "ranks/rank-00000.json").write_text(json.dumps(index))
    state, read = FullState(tmp_path), []
    monkeypatch.setattr(safe_load, "copy_numbers", lambda out, part: (read.append(len(part)), out.copy_(part)))
    for start, end in [(0, 120), (0, 30), (30, 60), (29, 61), (1, 2), (7, 113), (60, 60), (115, 120)]:
        read.clear()
        assert torch.equal(state.read_flat("w", "fp32", start, end - start), whole.reshape(-1)[start:end])
        assert sum(read) == end - start
