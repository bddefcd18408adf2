"""The routers' loss of a model in layers, also cut into stages, is the one that transformers computes of the whole."""

import pytest
import torch

from tests.models.small import TEXT, TRANSFORMERS, batch_of
from zerofit.models.build import build, forward_logits
from zerofit.models.catalog import find
from zerofit.models.layers import as_layers
from zerofit.models.router_loss import ends, router_loss

COEFFICIENT, SMALL = 0.7, 1e-3  # of gradients from the logits, so that those from the routers' loss count


def made(case: str):
    """Two equal models, the loss of their routers, and a batch."""
    name, args = TRANSFORMERS[case]
    pair = []
    for _ in range(2):
        torch.manual_seed(5)
        args = {**args, "router_aux_loss_coef": COEFFICIENT, "initializer_range": 0.12}
        pair.append(build(find(name), TEXT, args).train())
    return *pair, router_loss(pair[1]), batch_of(TEXT)


@pytest.mark.parametrize("case", ["mixtral", "qwen3 moe"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_stage_sends_the_sums_and_gets_their_gradient(case, checkpointing):
    whole, cut, loss, x = made(case)
    logits, routers = forward_logits(whole, x)
    torch.manual_seed(1)
    pull = SMALL * torch.randn_like(logits)
    ((logits * pull).sum() + routers).backward()

    layers = as_layers(cut, checkpointing=checkpointing, loss=loss)
    sent = x
    for layer in layers[:2]:  # the embedding and the first block
        sent = layer.module(sent)
    sent = ends(*sent)
    received = tuple(tensor.detach().requires_grad_() for tensor in sent)
    given = received
    for layer in layers[2:]:
        given = layer.module(given)
    last, sums = given
    own = loss.of(sums)
    ((last * pull).sum() + own).backward()
    for tensor, got in zip(sent, received, strict=True):  # as DeepSpeed's engine does
        tensor.backward(gradient=got.grad, retain_graph=tensor is sent[0])

    torch.testing.assert_close(last, logits, rtol=0, atol=0)
    torch.testing.assert_close(own, routers, rtol=1e-6, atol=0)
    assert own > 0.5 * COEFFICIENT
    grads = {name: p.grad for name, p in whole.named_parameters()}
    for name, p in cut.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_the_first_stages_gradient_is_not_that_without_the_loss():
    """Which a stage that dropped what it is sent would have."""
    whole, cut, _, x = made("mixtral")
    logits, routers = forward_logits(whole, x)
    (SMALL * logits.sum() + routers).backward()
    (SMALL * forward_logits(cut, x)[0].sum()).backward()
    with_loss, without = (m.get_parameter("model.layers.0.mlp.gate.weight").grad for m in (whole, cut))
    assert (with_loss - without).norm() > 0.1 * without.norm()


@pytest.mark.parametrize("args", [{"router_aux_loss_coef": 0.0}, None])
def test_models_without_such_a_loss(args):
    name, shape = TRANSFORMERS["mixtral" if args else "deepseek v2"]
    assert router_loss(build(find(name), TEXT, {**shape, **(args or {})})) is None


def test_a_model_without_experts_gives_no_router_s_loss():
    """Granite 4's dense models have the class, and the options, of those with experts."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "shared_intermediate_size": 48}
    layers = {
        "num_hidden_layers": 2,
        "layer_types": ["attention"] * 2,
        "vocab_size": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
    }
    torch.manual_seed(0)
    model = build(
        find("granite-4.0-350m"), None, {**sizes, **layers, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    )
    ids = torch.arange(12).reshape(1, 12)
    out = model(input_ids=ids, labels=ids)
    logits = out.logits[:, :-1].reshape(-1, 64)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(logits, ids[0, 1:]))
