"""Repeated results of ops against FakeTensorMode's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache

from zerofit.simulate.ops import shortcuts
from zerofit.simulate.ops.costs import leaves_of
from zerofit.simulate.ops.shortcuts import repeated

aten = torch.ops.aten
pytestmark = pytest.mark.versions(of="torch")
CALLS: dict[str, Callable[[Tensor, Tensor], tuple]] = {
    "product": lambda a, b: (aten.mm.default, (a, b), {}),
    "type": lambda a, b: (aten._to_copy.default, (a,), {"dtype": torch.bfloat16}),
    "number": lambda a, b: (aten.mul.Tensor, (a, 2), {}),
    "transposed": lambda a, b: (aten.add.Tensor, (a.t(), b), {}),
    "several outputs": lambda a, b: (aten.native_layer_norm.default, (a, [4], None, None, 1e-5), {}),
    "list": lambda a, b: (aten.cat.default, ([a, b], 1), {}),
    "rows into a view": lambda a, b: (aten.cat.out, ([a[0], b[1]],), {"out": torch.empty(9)[1:]}),
    "matrices into a tensor": lambda a, b: (aten.cat.out, ([a, b],), {"out": torch.empty(8, 4)}),
    "new": lambda a, b: (aten.empty.memory_format, ([3, 5],), {"dtype": torch.int8, "device": torch.device("cpu")}),
    "_unsafe_view": lambda a, b: (aten._unsafe_view.default, (a, [2, 8]), {}),
    "view": lambda a, b: (aten.slice.Tensor, (a, 0, 1, 3), {}),
}


def seen(out: object) -> list[object]:
    """Return all that the simulation reads of an op's output."""
    return [
        (t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.untyped_storage().nbytes(), sorted(vars(t)))
        if isinstance(t, FakeTensor)
        else t
        for t in leaves_of(out)
    ]


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_result_is_the_one_of_torch(name):
    with FakeTensorMode() as mode:
        func, args, kwargs = CALLS[name](torch.empty(4, 4), torch.empty(4, 4))
        with disable_fake_tensor_cache(mode):
            expected = seen(func(*args, **kwargs))
        assert [seen(shortcuts.run(func, args, kwargs)) for _ in range(3)] == [expected] * 3


def test_a_repeated_result_keeps_its_conjugate_bit():
    """Without it, `resolve_conj` would copy nothing."""
    with FakeTensorMode():
        x = torch.empty(4, 4, dtype=torch.complex64)
        for lazy, bit in ((x.conj(), Tensor.is_conj), (x.conj().imag, Tensor.is_neg)):
            assert all(bit(repeated(aten._unsafe_view.default, (lazy, [16]), {})) for _ in range(2))


def test_only_the_first_call_reaches_torch(monkeypatch):
    calls = []
    with FakeTensorMode():
        a, large = torch.empty(7, 7), torch.empty(50)
        monkeypatch.setattr(FakeTensorMode, "dispatch", _counted(FakeTensorMode.dispatch, calls))
        for source in (a, a.clone(), large[1:].as_strided((7, 7), (7, 1))):
            made = repeated(aten.mul.Tensor, (source, 3), {})
        assert calls.count(aten.mul.Tensor) == 1
        repeated(aten.mul.Tensor, (a, 3.0), {})
        repeated(aten.mul.Tensor, (a.t(), 3), {})
        assert calls.count(aten.mul.Tensor) == 3
    assert made.untyped_storage().nbytes() == 7 * 7 * 4


def test_an_op_in_place_returns_its_argument():
    with FakeTensorMode():
        for _ in range(3):
            a = torch.empty(6, 2)
            assert repeated(aten.add_.Tensor, (a, 1), {}) is a


def test_rows_are_joined_into_a_given_tensor_without_torch(monkeypatch):
    calls = []
    with FakeTensorMode():
        rows, out = [torch.empty(3), torch.empty(5)], torch.empty(8)
        monkeypatch.setattr(FakeTensorMode, "dispatch", _counted(FakeTensorMode.dispatch, calls))
        assert shortcuts.run(aten.cat.out, (rows,), {"out": out}) is out
        assert calls == []
        shortcuts.run(aten.cat.out, (rows,), {"out": torch.empty(8, dtype=torch.float64)})
        assert aten.cat.out in calls
        with pytest.raises(IndexError):
            shortcuts.run(aten.cat.default, (rows, 1), {})


def test_results_of_known_values_are_not_repeated():
    with FakeTensorMode():
        outs = [repeated(aten.add.Tensor, (torch.tensor(n), 1), {}) for n in range(3)]
    assert [out.constant.item() for out in outs] == [1, 2, 3]


def test_the_default_type_counts():
    with FakeTensorMode():
        made = []
        for dtype in (torch.float32, torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            made.append(repeated(aten.div.Tensor, (torch.empty(3, dtype=torch.int64), 2), {}).dtype)
        torch.set_default_dtype(torch.float32)
    assert made == [torch.float32, torch.float32, torch.float64]


def _counted(dispatch: Callable[..., object], calls: list[object]) -> Callable[..., object]:
    def counted(self: FakeTensorMode, func: object, *args: object) -> object:
        calls.append(func)
        return dispatch(self, func, *args)

    return counted
