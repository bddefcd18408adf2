"""The loss in chunks against torch's cross entropy in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.rollout.live_bytes import Live
from zerofit.spec.model_facts import IGNORE_INDEX
from zerofit.train.loss import linear_cross_entropy, weighted_cross_entropy

TARGETS, CLASSES = 37, 11


def made(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, CLASSES, (TARGETS,))
    labels[::5] = IGNORE_INDEX
    return torch.randn(TARGETS, CLASSES).mul(3).to(dtype).requires_grad_(), labels


@pytest.mark.parametrize("chunk", [1, 8, TARGETS, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_chunks_give_the_loss_and_gradient_of_all_at_once(dtype, tolerance, chunk):
    logits, labels = made(dtype)
    exact = logits.detach().double().requires_grad_()
    wanted = functional.cross_entropy(exact, labels, ignore_index=IGNORE_INDEX, reduction="sum") * 0.25
    wanted.backward()
    loss = weighted_cross_entropy(logits.reshape(1, TARGETS, CLASSES), labels.reshape(1, TARGETS), 0.25, chunk)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=tolerance, atol=tolerance * 0.25)


@pytest.mark.parametrize("chunk", [1, 8, TARGETS, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_hidden_states_give_the_loss_and_gradients_of_their_logits(dtype, tolerance, chunk):
    labels = made(dtype)[1]
    hidden, weight = (torch.randn(n, 6).to(dtype).requires_grad_() for n in (TARGETS, CLASSES))
    loss = linear_cross_entropy(hidden.reshape(1, TARGETS, 6), weight, labels.reshape(1, TARGETS), chunk) * 0.25
    loss.backward()
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    wanted = functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum") * 0.25
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=tolerance)
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        assert ours.grad.dtype == dtype
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=tolerance, atol=tolerance)


def test_a_frozen_head_gets_no_gradient():
    labels = made(torch.float32)[1]
    hidden, weight = torch.randn(TARGETS, 6, requires_grad=True), torch.randn(CLASSES, 6)
    linear_cross_entropy(hidden, weight, labels, 8).backward()
    logits = (exact := hidden.detach().clone().requires_grad_()) @ weight.T
    functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum").backward()
    torch.testing.assert_close(hidden.grad, exact.grad)
    assert weight.grad is None


@pytest.mark.parametrize("from_hidden", [True, False])
def test_a_further_chunk_takes_no_more_memory(from_hidden):
    """The logits of a chunk are freed before those of the next one exist."""

    def peak(targets: int) -> int:
        hidden, weight = torch.empty(targets, 8), torch.empty(1000, 8)
        labels = torch.zeros(targets, dtype=torch.long)
        given = (hidden if from_hidden else torch.empty(targets, 1000)).requires_grad_()
        with Live() as live:
            if from_hidden:
                linear_cross_entropy(given, weight, labels, 16)
            else:
                weighted_cross_entropy(given, labels, 1.0, 16)
        return live.peak - 2 * given.nbytes  # the input, of which chunks are views, and its gradient

    assert abs(peak(64) - peak(16)) < 0.01 * 16 * 1000 * 4


def test_a_scaled_loss_keeps_small_gradients_in_fp16():
    """The weight of a large batch would vanish in fp16, were it not multiplied with the loss scale first."""
    logits, labels = made(torch.float16)
    (weighted_cross_entropy(logits, labels, 1e-7, 8) * 2.0**16).backward()
    exact = logits.detach().double().requires_grad_()
    (functional.cross_entropy(exact, labels, ignore_index=IGNORE_INDEX, reduction="sum") * 1e-7 * 2.0**16).backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-2, atol=1e-5)


def test_without_gradients_nothing_is_kept():
    logits, labels = made(torch.float32)
    with torch.no_grad():
        assert not weighted_cross_entropy(logits, labels, 1.0, 8).requires_grad
