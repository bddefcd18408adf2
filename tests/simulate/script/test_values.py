"""Values that a script's control flow reads, and loops that end by them."""

from __future__ import annotations

import pytest
import torch

from tests.simulate.script.scripts import facts, refused, simulated
from tests.simulate.script.test_files import TRAINED
from zerofit.app.simulation.scripts import simulate_script
from zerofit.spec.cluster import Cluster

LOOP = """\
import math, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        y = self.inner(x)
        if y.max() > 3:
            raise ValueError("a spike")
        return y

net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
for step in range(50):
    tokens, done = torch.zeros(4, 1, dtype=torch.long, device="cuda"), torch.zeros(4, dtype=torch.bool, device="cuda")
    while not done.all():
        logits = net(torch.randn(4, 64, device="cuda"))
        drawn = torch.multinomial(logits.softmax(-1), 1)
        tokens = torch.cat([tokens, drawn], dim=1)
        done = done | (drawn[:, 0] == 2) | (torch.full((4,), tokens.shape[1] >= 20, device="cuda"))
    assert tokens.shape == (4, 20)
    scores = net(torch.randn(4, 64, device="cuda"))
    if not ((scores[1:] >= scores[:3]) & (scores[1:] <= 1)).all():
        raise ValueError("the scores are not in order")
    for iteration in range(5):
        if (scores.diff() < 1e-3).all() or (scores > 1e-3).all():
            break
    assert iteration == 4
    loss = scores.square().mean()
    assert torch.isfinite(loss) and not loss.isnan() and math.log(loss.item()) < 9
    loss.backward()
    assert all(p.grad.isfinite().all() and not torch.isinf(p.grad).any() for p in net.parameters())
    assert not (loss != loss).item() and net.inner.weight[~net.inner.weight.isfinite()].numel() == 0
    if loss > 100:
        optimizer.zero_grad()
        continue
    optimizer.step()
    optimizer.zero_grad()
"""
# beam search and both kinds of caches; `computed` are the tokens of which the simulation runs the model
GENERATION = """\
import sys, torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, T5Config, T5ForConditionalGeneration

sys.modules["zerofit.simulate.script.generation"].COMPUTED = COMPUTED
sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, intermediate_size=64, vocab_size=64)
window = dict(head_dim=8, sliding_window=12, layer_types=["sliding_attention", "full_attention"])
own = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **window, num_hidden_layers=2)).cuda()
config = T5Config(d_model=32, d_ff=64, num_layers=1, d_kv=8, num_heads=4, vocab_size=64, decoder_start_token_id=0)
both = T5ForConditionalGeneration(config).cuda()
optimizer = torch.optim.AdamW(own.parameters())
ids = torch.randint(3, 64, (8, 10)).cuda()
mask = torch.ones_like(ids)
mask[0, :4] = 0
for _ in range(9):
    for model, start, kind in ((own, 10, {"do_sample": True}), (both, 1, {"num_beams": 2})):
        made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=9, **kind)
        assert made.shape == (8, start + 9), made.shape
        assert made[torch.arange(8) > 0].shape[0] == 7  # by a mask in host memory
    own.train()(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_loops_end_at_their_own_limit_and_losses_are_finite(folder):
    result = simulated(LOOP, gpus=1)
    assert {p.step for p in result.phases} == {-1, 0, 1}
    notes = [note.text for note in facts(result).facts.notes]
    assert "the value of a tensor on the device: assumed to be False, at train.py:11" in notes


def test_generation_reaches_its_limit_in_a_few_tokens(folder):
    short, full = (simulated(GENERATION.replace("= COMPUTED", f"= {n}"), gpus=1) for n in (3, 99))
    assert any("9 new tokens, the limit; 3 of these tokens were computed" in n.text for n in facts(short).facts.notes)
    phases = [[p for p in one.phases if p.name == "generation"] for one in (short, full)]
    assert [p.step for p in phases[0]] == [0, 1]
    for few, every in zip(*phases, strict=True):
        # the tokens themselves: 6 fewer of 8 bytes in each row of 8, in a few tensors
        assert few.peak_bytes - few.start_bytes == pytest.approx(every.peak_bytes - every.start_bytes, abs=4096)
        # beam search leaves tokens in reference cycles, which live until Python's garbage collector runs
        assert few.end_bytes - few.start_bytes == pytest.approx(every.end_bytes - every.start_bytes, abs=1024)


ENDLESS = """\
import sys, time, torch
progress = sys.modules["zerofit.simulate.script.rank"]
progress.LIMIT_S = 2.0
x = torch.randn(4, device="cuda")
while LOOP:
    x = x + 1
    time.sleep(0.01)
"""


@pytest.mark.parametrize("loop", ["not (x > 9).all()", "True"])
def test_a_phase_that_does_not_end_is_named_with_its_line(folder, loop):
    problem = refused(ENDLESS.replace("LOOP", loop), gpus=1)
    assert problem.message.startswith("build did not end within")
    assert problem.where in [f"train.py:{line}" for line in (5, 6, 7)]  # the head of the loop runs, too


SMALLER = """\
import torch
from torch import nn

net = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(net.parameters())
size = 1 << 26  # 256 GiB of inputs
while True:
    try:
        net(torch.randn(size, 1024, device="cuda")).sum().backward()
        optimizer.step()
    except CAUGHT
        size //= 2
"""


@pytest.mark.parametrize(
    ("caught", "expected"),
    [
        ("torch.cuda.OutOfMemoryError:", True),
        ("RuntimeError as error:\n        assert 'out of memory' in str(error)", True),
        ("ValueError:", False),
    ],
)
def test_a_script_that_would_try_a_smaller_batch_is_named(folder, caught, expected):
    result = simulated(SMALLER.replace("CAUGHT", caught), gpus=1)
    notes = [note.text for note in facts(result).facts.notes if "out-of-memory" in note.text]
    assert not result.fits and len(notes) == expected
    assert all(text.startswith("train.py:8 catches") for text in notes)


FREED = """\
import torch

def step():
    large = torch.empty(1 << 24, device="cuda")
    return (large * 2).sum()

for _ in range(5):
    step()
"""


def test_a_script_that_does_not_fit_frees_memory_as_one_that_fits(folder):
    (folder / "train.py").write_text(FREED + TRAINED)
    results = [
        simulate_script(["python", "train.py"], Cluster("h100-80gb", gpus=1, device_memory=memory))
        for memory in ("1MiB", "80GiB")
    ]
    assert [result.fits for result in results] == [False, True]
    assert results[0].peak_bytes == results[1].peak_bytes >= 2 * 4 * (1 << 24)
    assert results[0].phases == results[1].phases


IMAGES = """\
import torch
from torch.utils.data import DataLoader

SIDE = 512
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, number):
        images = torch.zeros(2, 3, SIDE, SIDE)  # the second image of every other row is padding
        images[: 1 + number % 2] = 0.5
        return images

def check(number):
    if number > 5:
        raise ValueError("too near")

net = torch.nn.Conv2d(3, 8, 16, 16).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for images in DataLoader(Rows(), batch_size=4):
    images = images.cuda().to(torch.bfloat16).flatten(0, 1)
    real = (images == 0.0).sum(dim=(-1, -2, -3)) != images.shape[1:].numel()
    assert real.tolist() == [True, False, True, True] * 2
    out = net(images[real].contiguous().float())
    check(len(out) - LESS)
    near = out.detach() < 1  # computed: unknown
    CHECK
    out.sum().backward()
    optimizer.step()
"""


def test_images_that_are_padding_are_known(folder):
    """As SmolVLM finds them. A batch is 25 MB, which is real since the data loader makes it."""
    seen = facts(simulated(IMAGES.replace("LESS", "1").replace("CHECK", ""), gpus=1))
    assert seen.facts.ended == "stopped after 2 optimizer steps" and not seen.is_upper_bound


def test_an_error_after_sizes_were_assumed_is_not_the_scripts(folder):
    assumed = "check(out[near].numel())"
    problem = refused(IMAGES.replace("LESS", "1").replace("CHECK", assumed), gpus=1)
    assert problem.kind == "not-simulated" and "assumed values before: ValueError: too near" in problem.message
    assert "a mask of unknown values as an index: assumed to be all True" in (problem.hint or "")
    summed = "check(1 if out.detach().cpu().numpy().any() else 9)"
    problem = refused(IMAGES.replace("LESS", "1").replace("CHECK", summed), gpus=1)
    assert "assumed values before" in problem.message and "these are zeros, at train.py" in (problem.hint or "")
    problem = refused(IMAGES.replace("LESS", "0").replace("CHECK", ""), gpus=1)
    assert problem.message.startswith("this is the script's error: ValueError: too near")


# also runs with gloo's ranks, whose results are these
COLLECTIVES = """\
import os
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

simulated = torch.cuda.is_available()
dist.init_process_group("nccl" if simulated else "gloo")
ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
splits = [2] * (ranks - 1) + [3]
mine = splits[rank]
for device in ("cpu", "cuda") if simulated else ("cpu",):
    def tensors(*values):
        return [torch.tensor(value, device=device) for value in values]

    def zeros(*sizes):
        return [torch.zeros(size, dtype=torch.long, device=device) for size in sizes]

    for kind, expected in (("SUM", 3 * ranks), ("PRODUCT", 3**ranks), ("MAX", 3), ("MIN", 3)):
        (three, again), (out,), (first, second) = tensors([3], [3]), zeros(1), zeros(1, 1)
        dist.all_reduce(three, getattr(dist.ReduceOp, kind))
        assert three.item() == expected, (device, kind, three)
        dist.reduce_scatter_tensor(out, torch.full((ranks,), 3, device=device), getattr(dist.ReduceOp, kind))
        assert out.item() == expected
        dist.all_reduce_coalesced([again, first], getattr(dist.ReduceOp, kind))
        assert again.item() == expected and first.item() == 0
        if kind in ("SUM", "PRODUCT", "MAX"):
            made = functional.all_reduce(torch.full((1,), 3, device=device), kind.lower(), group)
            assert made.tolist() == [expected], (device, kind, made)
    whole, (three,) = torch.arange(2 * ranks + 1, device=device), tensors([3])
    dist.reduce(three, 0)
    assert rank or three.item() == 3 * ranks
    gathered = zeros(*[1] * ranks)
    dist.gather(tensors([5])[0], gathered if rank == 0 else None)
    assert rank or torch.cat(gathered).tolist() == [5] * ranks
    (out,), parts = zeros(2), list(whole[:-1].chunk(ranks))
    dist.reduce_scatter(out, parts)
    assert out.tolist() == [2 * rank * ranks, (2 * rank + 1) * ranks]
    if rank == 0:
        dist.scatter(out, parts)
    else:
        dist.scatter(out)
    assert out.tolist() == [2 * rank, 2 * rank + 1] or simulated and rank
    gathered = zeros(*[2] * ranks)
    dist.all_to_all(gathered, parts)
    assert torch.cat(gathered).tolist() == [2 * rank, 2 * rank + 1] * ranks
    (out,) = zeros(mine * ranks)
    dist.all_to_all_single(out, whole, [mine] * ranks, splits)
    again = functional.all_to_all_single(whole, [mine] * ranks, splits, group)
    assert out.tolist() == again.tolist() == whole.split(splits)[rank].tolist() * ranks
    made = functional.all_gather_into_tensor_coalesced([torch.arange(2, device=device), *tensors([7])], group)
    assert [t.tolist() for t in made] == [[0, 1] * ranks, [7] * ranks]
    made = functional.all_reduce_coalesced([torch.arange(2, device=device)], "sum", group)
    assert made[0].tolist() == [0, ranks] and functional.broadcast(whole, 0, group).tolist() == whole.tolist()
    objects = [None]
    dist.scatter_object_list(objects, [10 + n for n in range(ranks)])
    assert objects == [10 + rank]
(unknown,) = zeros(4 * ranks)
dist.all_gather_into_tensor(unknown, torch.randn(4, 9, device=device).argmax(-1))  # no longer known to be zeros
assert not simulated or "_known" not in vars(unknown)
"""


def test_collectives_have_the_results_of_ranks_with_equal_values(folder):
    for rank in (0, 3):
        simulated(COLLECTIVES + TRAINED, "torchrun --nproc_per_node 4 train.py", gpus=4, rank=rank)


# the values of views, of `.data` and of lists of tensors; the device's own results are the reference
SHARED = """\
import torch
sizes = torch.empty((2, 2), dtype=torch.long, device="cuda")  # as RT-DETR sets the sizes of its levels
for level, size in enumerate(((4, 6), (2, 3))):
    sizes[level, 0], sizes[level, 1] = size
assert (sizes[:, 0] * sizes[:, 1]).sum() == 30
on_device = torch.arange(6, device="cuda")
first, mask = on_device[:2], torch.zeros(4, dtype=torch.bool, device="cuda")
first.mul_(torch.zeros((), dtype=torch.long, device="cuda"))
assert on_device.tolist() == [0, 0, 2, 3, 4, 5]
half = mask[:2]
half |= torch.ones((), dtype=torch.bool, device="cuda")
assert mask.tolist() == [True, True, False, False]
first.data = torch.ones_like(first)
assert first.tolist() == [1, 1]
tokens = torch.full((2, 5), 7, device="cuda")
tokens[:, 1] = torch.randn(2, 9, device="cuda").argmax(-1)
assert not (tokens == 7).all()
filled = torch.empty(4, dtype=torch.long, device="cuda")
before, detached = filled[:2], torch.arange(3, device="cuda")
filled.fill_(3)
filled[1:3] += 1
assert filled.tolist() == [3, 4, 4, 3]
before.copy_(torch.randn(2, 9, device="cuda").argmax(-1))
detached.detach()[0] = torch.randn(9, device="cuda").argmax()
assert not (filled == 3).any() and not (detached == 0).any()  # unknown now, and assumed to be False
sums = torch.empty(3, 2, dtype=torch.long, device="cuda").t()
torch.add(torch.zeros(2, 3, dtype=torch.long, device="cuda"), 1, out=sums)
sums[:, 0] = 5
assert sums.tolist() == [[5, 1, 1]] * 2 and sums.t().contiguous().view(-1).tolist() == [5, 5, 1, 1, 1, 1]
weight = torch.nn.Parameter(torch.zeros(3, device="cuda"))
weight.grad = torch.ones(3, device="cuda")
torch.optim.SGD([weight], lr=1.0).step()
assert weight.tolist() == [-1, -1, -1]
weight.grad = torch.randn(3, device="cuda")
torch.optim.SGD([weight], lr=1.0).step()
assert "_known" not in vars(weight)
scaler, weight = torch.amp.GradScaler("cuda"), torch.nn.Parameter(torch.randn(100, device="cuda"))
scaler.scale(weight.sum()).backward()
optimizer = torch.optim.SGD([weight])
scaler.unscale_(optimizer)
scaler.update()
assert scaler.get_scale() == 65536
"""


def test_tensors_that_share_memory_share_what_is_known_of_their_values(folder):
    simulated(SHARED + TRAINED, gpus=1)


WITHOUT_RULES = """\
import torch
from torch.distributions import Beta, Binomial, Dirichlet, NegativeBinomial, Normal, StudentT
from torch.nn.functional import ctc_loss

layer = torch.nn.Linear(64, 512).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, fused=True)
others = [
    kind([torch.zeros(8, device="cuda", requires_grad=True)], lr=lr, fused=True)
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    for lr in (0.1, torch.tensor(0.1))
]
for other in others:
    (weight,) = other.param_groups[0]["params"]
    weight.grad = torch.ones_like(weight)
lengths, targets = torch.tensor([3, 20, 7, 9]), torch.ones(4, 30, dtype=torch.long)
for i in range(50):
    out = layer(torch.randn(96, 4, 64, device="cuda"))
    scores = out.log_softmax(-1)
    before = torch.cuda.memory_allocated()
    loss = ctc_loss(scores, targets.cuda(), torch.full((4,), 96), lengths.cuda())
    print("kept", torch.cuda.memory_allocated() - before)
    loss = loss + ctc_loss(scores, targets.cuda(), [96] * 4, lengths.tolist())
    rates = out.exp()
    loss = loss + sum(d.log_prob(rates).mean() for d in (Normal(out, rates), StudentT(2 + rates, out, rates)))
    loss = loss + NegativeBinomial(rates, out).log_prob(rates.round()).mean()
    loss = loss + Beta(rates, rates).rsample().mean() + Dirichlet(rates).rsample().mean()
    loss = loss + torch.fake_quantize_per_tensor_affine(out, 0.1, 0, -128, 127).mean()
    assert Binomial(5, rates.sigmoid()).sample().shape == out.shape
    loss.backward()
    for other in others:
        other.step()
    optimizer.step()
    optimizer.zero_grad()
raise SystemExit("not stopped")
"""


def test_ops_without_shape_rules_in_torch(folder):
    """CTC keeps what torch's kernel on the host keeps; the other ops return what their arguments have."""
    lengths, targets = torch.tensor([3, 20, 7, 9]), torch.ones(4, 30, dtype=torch.long)
    scores = torch.randn(96, 4, 512).log_softmax(-1)
    kept = sum(t.nbytes for t in torch.ops.aten._ctc_loss(scores, targets, torch.full((4,), 96), lengths))
    most = f"- before <= {kept} + 8192"
    text = WITHOUT_RULES.replace('print("kept", ', f"assert {kept} <= ").replace("- before)", most)
    assert facts(simulated(text, gpus=1)).facts.ended == "stopped after 2 optimizer steps"


SECOND_ORDER = """\
import sys, torch

net = torch.nn.Linear(256, 256, bias=False).cuda()
search = {"constant": None}.get(sys.argv[2], sys.argv[2])
optimizer = torch.optim.LBFGS(net.parameters(), history_size=int(sys.argv[1]), line_search_fn=search)
calls = 0

def closure():
    global calls
    calls += 1
    optimizer.zero_grad()
    loss = net(torch.randn(4, 256, device="cuda")).square().mean()
    loss.backward()
    return loss

for step in range(3):
    optimizer.step(closure)
    assert calls <= 25 * (step + 1) and optimizer.state[net.weight]["n_iter"] == 20 * (step + 1)
"""


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("search", ["constant", "strong_wolfe"])
def test_the_history_of_lbfgs_is_full(search):
    """Each update needs two copies of the parameters; 20 iterations of a step are more than 4 updates, not 100."""
    short, long = (simulated(SECOND_ORDER, f"python train.py {size} {search}", gpus=1) for size in (4, 100))
    assert long.peak_bytes - short.peak_bytes == pytest.approx(96 * 2 * 4 * 256**2, rel=1e-3)
    assert not facts(short).is_upper_bound and facts(long).is_upper_bound
