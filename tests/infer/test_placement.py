"""Where accelerate's map puts what, what that takes, and when it does not fit; GPUs are made up, nothing is loaded."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from accelerate.utils.modeling import check_device_map

from tests.models.small import IMAGES, TEXT, TRANSFORMERS
from zerofit.infer.limits import MemoryLimits, read_limits, uncounted_bytes
from zerofit.infer.placement import compact_names, place, refuse_misfit, table_rows
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.spec.errors import DoesNotFit, UserError
from zerofit.spec.reservations import reserve

WORKING = 5 << 20
ROOM, GPU_ROOM = uncounted_bytes("cpu"), uncounted_bytes(0)


def empty(key):
    name, args = TRANSFORMERS.get(key, (key, {}))
    source = find(name)
    with torch.device("meta"):
        return build(source, IMAGES if source.task == "image" else TEXT, args)


@pytest.fixture(scope="module")
def llama():
    """Some 100 MiB: twelve layers of 8 MiB."""
    with torch.device("meta"):
        return build(find("llama-tiny"), TEXT, {"hidden_size": 512, "num_hidden_layers": 12, "intermediate_size": 1024})


def held(model):
    return sum(t.nbytes for t in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("key", ["gpt2", "bert", "swin_t", "resnet18"])
def test_every_tensor_has_a_place_at_any_size(key):
    model = empty(key)
    weights = held(model)
    for share in (0.0, 0.3, 0.55, 0.8, 1.0):
        memory = {
            0: int(share * weights) + GPU_ROOM + WORKING,
            1: GPU_ROOM + WORKING + weights // 3,
            "cpu": weights // 4,
        }
        placement = place(model, MemoryLimits(memory=memory), WORKING)
        assert sum(row.weights for row in placement.rows) == weights
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it has single parameters, too
            check_device_map(model, placement.device_map)


def test_a_model_that_fits_stays_on_one_device(llama):
    placement = place(llama, MemoryLimits(memory={0: held(llama) + GPU_ROOM + WORKING + 1, "cpu": 1 << 40}), WORKING)
    assert placement.device_map == {"": 0}
    (row,) = placement.rows
    assert row.needed == held(llama) + WORKING + GPU_ROOM
    assert (placement.main, placement.fits) == (0, True)


def test_gpus_first_then_memory_then_disk(llama):
    layer = 8 << 20
    gpu = GPU_ROOM + WORKING + 3 * layer
    placement = place(llama, MemoryLimits(memory={0: gpu, 1: gpu, "cpu": 4 * layer}), WORKING)
    assert [row.device for row in placement.rows] == [0, 1, "cpu", "disk"]
    assert placement.fits
    first, second, host, disk = placement.rows
    assert (first.layer, second.layer) == (1024 * 512 * 4, 0)  # what memory and disk hold runs on the first GPU
    assert (host.working, host.layer, disk.needed) == (0, 0, disk.weights)


def test_what_is_named_is_used_and_nothing_else(llama):
    placement = place(llama, MemoryLimits(memory={"cpu": 1 << 40}), WORKING)
    assert (placement.device_map, placement.main) == ({"": "cpu"}, "cpu")


def test_other_models_stay_on_one_gpu():
    model = empty("resnet18")
    memory = {0: held(model) // 2 + GPU_ROOM + WORKING, 1: 1 << 40, "cpu": 1 << 40}
    assert {row.device for row in place(model, MemoryLimits(memory=memory), WORKING).rows} == {0, "cpu"}


@pytest.mark.parametrize("spare", [-1, 0])
def test_the_least_that_is_needed(llama, spare):
    """The largest module that is taken in, activations and room: one byte less does not do."""
    largest = max(p.nbytes for p in llama.parameters())
    limits = MemoryLimits(memory={"cpu": largest + WORKING + ROOM + sum(b.nbytes for b in llama.buffers()) + spare})
    placement = place(llama, limits, WORKING)
    assert placement.fits == (spare == 0)
    if spare:
        with pytest.raises(DoesNotFit, match="cpu needs") as found:
            refuse_misfit(placement, limits, "a smaller --micro-batch")
        assert "--max-memory cpu=" in found.value.problems[0].hint
        assert "--micro-batch" in found.value.problems[0].hint
        free = replace(limits, named=False, reserved={"cpu": 3 << 30})
        text = r"allowed: .*, 95% of the free memory \(3.00 GiB reserved by other runs\)"
        with pytest.raises(DoesNotFit, match=text) as found:
            refuse_misfit(placement, free, "a smaller --micro-batch")
        assert "MiB starts it anyway" in found.value.problems[0].hint


def test_a_gpu_that_holds_no_layer_is_the_one_that_lacks_memory(llama):
    with pytest.raises(DoesNotFit, match=r"^0 needs") as found:
        refuse_misfit(place(llama, MemoryLimits(memory={0: GPU_ROOM}), WORKING), MemoryLimits(memory={}), "")
    assert "--max-memory 0=" in found.value.problems[0].hint


def test_no_disk_means_no_disk(llama):
    placement = place(llama, MemoryLimits(memory={"cpu": held(llama) // 2 + ROOM + WORKING}, disk=0), WORKING)
    with pytest.raises(DoesNotFit, match="allowed on disk: 0 B"):
        refuse_misfit(placement, MemoryLimits(memory={}), "")


def test_table(llama):
    rows = table_rows(place(llama, MemoryLimits(memory={"cpu": held(llama) // 2 + ROOM + WORKING}), WORKING))
    assert [row["device"] for row in rows] == ["cpu", "disk"]
    assert rows[1]["allowed"] == "any"
    assert compact_names(("a.0", "a.1", "a.2", "b", "a.4", "c.d")) == ["a.0-2", "b", "a.4", "c.d"]


def test_limits():
    assert read_limits("cpu=2GiB, disk=0") == MemoryLimits(memory={"cpu": 2 << 30}, disk=0)
    free = read_limits(None)
    assert free.memory["cpu"] > 0
    assert free.disk is None and not free.named


def test_what_runs_have_reserved_is_not_free(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path))
    reserve(tmp_path / "run", 2**50, {})
    limits = read_limits(None)
    assert limits.memory["cpu"] == 0 and limits.reserved["cpu"] == 2**50


def test_everything_wrong_with_limits_at_once():
    with pytest.raises(UserError) as wrong:
        read_limits("99=1GiB,cpu=lots,gpu=1GiB,²=1GiB,disk=1GiB,disk=2GiB,7")
    assert [p.kind for p in wrong.value.problems] == [
        *("unknown-device", "bad-size", "unknown-device", "unknown-device", "bad-value", "bad-value"),
    ]
    assert {p.where for p in wrong.value.problems} == {"--max-memory"}


@pytest.mark.parametrize("text", ["disk=1GiB", "cpu=0", ""])
def test_limits_that_leave_nothing(text):
    with pytest.raises(UserError):
        read_limits(text)
