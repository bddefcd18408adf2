"""What a checkpoint file may hold, and that nothing else in it is run."""

from __future__ import annotations

import mmap
import os
import pickle
import subprocess
import sys

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from zerofit.checkpoint.safe_load import NORESERVE, copy_numbers, load, load_metadata
from zerofit.spec.errors import UserError


class Payload:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_a_payload_is_refused_and_does_not_run(tmp_path):
    for zipped in (True, False):
        file, trace = tmp_path / "model_states.pt", tmp_path / "it-ran"
        torch.save({"module": {}, "extra": Payload(trace)}, file, _use_new_zipfile_serialization=zipped)
        with pytest.raises(UserError) as error:
            load(file)
        problem = error.value.problems[0]
        assert problem.kind == "unsafe-file" and str(file) in problem.message and "mkdir" in problem.message
        assert not trace.exists()
    pickle.loads(pickle.dumps(Payload(trace)))
    assert trace.exists(), "the payload would have run"


class Attribute:
    """Pickled as an older Python pickles a member of an enum."""

    def __init__(self, owner, name):
        self.asked = owner, name

    def __reduce__(self):
        return getattr, self.asked


def test_a_stage_is_read_as_any_python_has_pickled_it(tmp_path):
    """Before 3.11.4, Debian 12's among them: `getattr(ZeroStageEnum, "gradients")`."""
    torch.save([Attribute(ZeroStageEnum, stage.name) for stage in ZeroStageEnum], tmp_path / "stages.pt")
    plain, own = load(tmp_path / "stages.pt"), load(tmp_path / "stages.pt", for_engine=True)
    assert plain == [0, 1, 2, 3] and {type(stage) for stage in plain} == {int}
    assert own == list(ZeroStageEnum) and {type(stage) for stage in own} == {ZeroStageEnum}


@pytest.mark.parametrize(
    ("owner", "name"), [(ZeroStageEnum, "from_bytes"), (ZeroStageEnum, "__members__"), (fragment_address, "__init__")]
)
@pytest.mark.parametrize("for_engine", [False, True])
def test_no_other_attribute_is_given(tmp_path, owner, name, for_engine):
    torch.save(Attribute(owner, name), tmp_path / "attribute.pt")
    with pytest.raises(UserError) as error:
        load(tmp_path / "attribute.pt", for_engine=for_engine)
    assert error.value.problems[0].kind == "unsafe-file" and "getattr" in error.value.problems[0].message


@pytest.fixture
def deepspeed_file(tmp_path):
    """The kinds of objects that DeepSpeed's files hold (found in real ones of all its stages)."""
    file = tmp_path / "optim_states.pt"
    dynamic = DynamicLossScaler(2**16, 1000, 1, 2, False)
    content = {
        "param_slice_mappings": [{"weight": fragment_address(numel=12, start=4)}],
        "loss_scaler": LossScaler(8.0),
        "dynamic": dynamic,
        "zero_stage": ZeroStageEnum.gradients,
        "flat": torch.arange(5.0),
    }
    torch.save(content, file)
    return file


def test_deepspeeds_objects_come_as_plain_ones(deepspeed_file):
    content = load(deepspeed_file)
    address = content["param_slice_mappings"][0]["weight"]
    assert (address.numel, address.start) == (12, 4)
    assert content["loss_scaler"].cur_scale == 8.0
    assert (content["dynamic"].cur_scale, content["dynamic"].cur_iter) == (2**16, 0)
    assert content["zero_stage"] == 2
    assert content["flat"].tolist() == [0, 1, 2, 3, 4]


def test_an_engine_gets_its_own_objects(deepspeed_file):
    content = load(deepspeed_file, for_engine=True)
    assert type(content["dynamic"]) is DynamicLossScaler and content["dynamic"].loss_scale == 2**16
    assert content["zero_stage"] is ZeroStageEnum.gradients


def test_reading_needs_no_deepspeed(deepspeed_file):
    script = f"import sys; from zerofit.checkpoint.safe_load import load; load({str(deepspeed_file)!r})"
    script += "; assert not [m for m in sys.modules if m.startswith('deepspeed')]"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_truncated_file_is_damaged(deepspeed_file, keep):
    whole = deepspeed_file.read_bytes()
    deepspeed_file.write_bytes(whole[: int(keep if keep >= 1 else keep * len(whole))])
    with pytest.raises(UserError) as error:
        load(deepspeed_file)
    assert error.value.problems[0].kind == "damaged-file"


def test_no_file(tmp_path):
    with pytest.raises(UserError) as error:
        load(tmp_path / "none.pt")
    assert error.value.problems[0].kind == "missing-file"


def test_a_file_may_be_larger_than_the_memory(tmp_path):
    count = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # in float32: twice the memory
    hole = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    with torch.serialization.skip_data():  # the file has a hole in place of the numbers
        torch.save({"weight": torch.frombuffer(hole, dtype=torch.float32)}, tmp_path / "large.pt")
    loaded = load(tmp_path / "large.pt")["weight"]
    assert len(loaded) == count and not loaded[-3:].any()
    loaded[0] = 1  # changes the copy in memory, not the file
    assert not load(tmp_path / "large.pt")["weight"][:1].any()


def test_large_tensors_are_read_from_the_file(tmp_path):
    torch.save({"a": torch.ones(3), "b": torch.arange(1 << 17) / 3}, tmp_path / "file.pt")
    stored = load(tmp_path / "file.pt")["b"][5:]
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(len(stored), dtype=dtype)
        copy_numbers(out, stored)
        assert torch.equal(out, stored.to(dtype))
    with (tmp_path / "file.pt").open("r+b") as file:
        file.truncate(1 << 18)
    with pytest.raises(UserError, match="shorter"):
        copy_numbers(torch.empty(len(stored)), stored)


def test_metadata_of_python_before_3_11_4_is_read(tmp_path, monkeypatch):
    """It pickles a member of an enum as `getattr(class, name)`, which is refused for everything else."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
    dcp.save({"weight": torch.arange(6.0).reshape(2, 3)}, checkpoint_id=tmp_path)
    file = tmp_path / ".metadata"
    assert b"getattr" in file.read_bytes()
    assert load_metadata(file).state_dict_metadata["weight"].size == (2, 3)
    monkeypatch.setattr(Payload, "__reduce__", lambda payload: (getattr, (torch.Size, "count")))
    file.write_bytes(pickle.dumps(Payload(tmp_path)))
    with pytest.raises(UserError, match=r"builtins\.getattr, which could run code"):
        load_metadata(file)
