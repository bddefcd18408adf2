"""Recurrent layers of simulated scripts: cuDNN's buffers."""

from __future__ import annotations

import pytest
import torch

from tests.simulate.script.scripts import facts, simulated
from zerofit.app.simulation.scripts import simulate_script
from zerofit.simulate.script import kernels
from zerofit.spec.cluster import Cluster

SCRIPT = """\
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

net = nn.KIND(123, 320, 4).cuda()
bare = torch.cuda.memory_allocated()
x = torch.randn(1000, 25, 123, device="cuda")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(50):
    out = None
    before = torch.cuda.memory_allocated()
    out, _ = net(x)
    assert out.shape == (1000, 25, 320)
    del _
    after = torch.cuda.memory_allocated()
    out.square().mean().backward()
    assert i or after - before == KEPT, after - before
    if i == 0:  # one tensor for all weights, and another for their gradients
        assert len({p.untyped_storage().data_ptr() for p in net.parameters()}) == 1
        assert len({p.grad.untyped_storage().data_ptr() for p in net.parameters()}) == 1
        other = nn.KIND(8, 16, 2, batch_first=True, bidirectional=True, dropout=0.5).cuda()
        rows = torch.randn(3, 5, 8, device="cuda", requires_grad=True)
        packed = pack_padded_sequence(rows, torch.tensor([5, 3, 2]), batch_first=True)
        assert packed.data.shape == (10, 8) and packed.batch_sizes.tolist() == [3, 3, 2, 1, 1]
        for half in (False, True):
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                made, _ = pad_packed_sequence(other(packed)[0], batch_first=True)
                assert made.shape == (3, 5, 32) and made.dtype == (torch.bfloat16 if half else torch.float32)
                assert other(rows)[0].shape == (3, 5, 32)
            made.float().sum().backward(retain_graph=True)
        assert rows.grad.shape == rows.shape and all(p.grad.dtype == torch.float32 for p in other.parameters())
        with torch.no_grad():
            assert net.eval()(x)[0].shape == out.shape
        net.train()
    optimizer.step()
    optimizer.zero_grad()
"""
# bytes of cuDNN's reserve for this network, as printed in github.com/pytorch/pytorch/issues/2895
RESERVES = {"LSTM": 736_000_000, "GRU": 864_000_000}


@pytest.mark.parametrize("kind", RESERVES)
def test_what_recurrent_layers_keep_is_what_cudnn_asked_for(folder, kind):
    states = (4 if kind == "LSTM" else 2) * 4 * 25 * 320 * 4  # the first and the last ones, of each layer
    given = states // 2  # the last ones are deleted
    kept = RESERVES[kind] + 1000 * 25 * 320 * 4 + given
    result = simulated(SCRIPT.replace("KIND", kind).replace("KEPT", str(kept)), gpus=1)
    assert facts(result).facts.micro_batch == 25  # the first dimension is the steps
    assert facts(result).is_upper_bound and any("workspace" in note.text for note in facts(result).facts.notes)


SPARSE = """\
import torch
from torch import nn

words = nn.Embedding(1000, 64, sparse=True).cuda()
optimizer = torch.optim.SparseAdam(words.parameters())
for i in range(50):
    words(torch.randint(0, 1000, (4, 8), device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_sparse_gradients_are_bounded_by_dense_ones(folder):
    result = simulated(SPARSE, gpus=1)
    assert result.breakdown["optimizer state"] == 2 * 4 * 1000 * 64 and facts(result).is_upper_bound
    assert result.breakdown["gradients"] == 4 * 1000 * 64


def test_the_workspace_of_an_lstm_on_the_host(monkeypatch):
    """Long sequences are extrapolated; the reference is oneDNN's own workspace."""
    zeros, steps, samples, hidden = torch.zeros, 60, 6, 40
    weights = (zeros(160, 24), zeros(160, 40), zeros(160), zeros(160), zeros(6, 40), zeros(6, 40))
    kind = (False, [], 2, hidden, 1, True, False, False, True)
    real = torch.mkldnn_rnn_layer(zeros(steps, samples, 24), *weights, *kind)[3].numel()
    shape = (steps, samples, 24)
    assert kernels._host_workspace(shape, hidden, torch.float32) == real
    kernels._host_workspace.cache_clear()
    monkeypatch.setattr(kernels, "_HOST_WORK", 20 * 8 * samples * hidden * 64)
    assert kernels._host_workspace(shape, hidden, torch.float32) == pytest.approx(real, rel=0.1)


PACKED = """\
import torch
from torch import nn

net = nn.GRU(8, 16, batch_first=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(50):
    rows = nn.utils.rnn.pack_padded_sequence(net.weight_ih_l0.new_ones(3, 5, 8), torch.tensor([5, 3, 2]), True)
    assert rows.data.shape == (10, 8) and rows.batch_sizes.tolist() == [3, 3, 2, 1, 1]
    net(rows)[0].data.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_packed_sequences_on_the_host(folder):
    (folder / "train.py").write_text(PACKED)
    result = simulate_script(["python", "train.py"], Cluster("cpu"))
    assert facts(result).facts.optimizer == "SGD" and not facts(result).is_upper_bound
