"""verl: its head and optimizer against torch, its offloading against arithmetic, its script against its keys."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.rollout.live_bytes import Live
from zerofit.app.planning.profiles import ProfileRequest, get_profile
from zerofit.app.simulation.scripts import simulate_script
from zerofit.cli.main import main
from zerofit.cli.options import JsonObject
from zerofit.rollout.heads import CHUNK_TOKENS, EARLY_VERL, VERL, with_whole_head
from zerofit.rollout.methods import RolloutSettings
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter

MODEL, PARAMETERS, VOCABULARY, HIDDEN, LENGTH = "qwen2.5-0.5b", 494_032_768, 151_936, 896, 1024
ROOT = VOCABULARY * HIDDEN + HIDDEN  # the tied matrix and the norm
CASE = (MODEL, "--gpu", "h100-80gb", "--gpus", "4", "--seq-len", "1024", "--micro-batch", "2", "--global-batch", "32")
SETTINGS = "trainer=verl,response_length=512,kl_loss_coef=0.001"


class CrossEntropy(torch.autograd.Function):
    """flash-attn's cross-entropy: it allocates nothing for each logit, and its gradient overwrites the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits[:, 0].float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0].mul_(grads[0].to(torch.bfloat16).unsqueeze(1))


def head_peaks(copies: int) -> tuple[int, int]:
    """Return the peaks of forward and backward in verl's `forward_step`, without the hidden states."""
    tokens, width, words = 64, 8, 4096
    hidden = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(words, width, dtype=torch.bfloat16, requires_grad=True)
    temperature = torch.ones(tokens, 1, dtype=torch.bfloat16)

    def forward() -> torch.Tensor:
        raw = hidden @ weight.t()  # the model's output lives until the function returns
        logits = raw / temperature if copies == 2 else raw.div_(temperature)
        return CrossEntropy.apply(logits).sum()  # pyright: ignore[reportReturnType, reportAttributeAccessIssue]

    size = 2 * tokens * words
    with Live() as live:
        loss = forward()
        first, live.peak = live.peak, live.bytes
        loss.backward()
    return round(first / size), round(live.peak / size)


@pytest.fixture(scope="module")
def profile():
    request = ProfileRequest(model=MODEL, precision="bf16", device="cuda", seq_len=LENGTH)
    return get_profile(request, Reporter(None))[0]


@pytest.mark.parametrize("copies", [1, 2])
def test_the_head_has_the_logits_of_torch(profile, copies):
    forward, backward = head_peaks(copies)
    assert (forward, backward) == (copies, 2)
    cost = with_whole_head(profile, VERL if copies == 2 else EARLY_VERL, 2).costs_of("bf16/checkpointing=1/tp=1/sp=1")[
        -1
    ]
    logits = 2 * LENGTH * VOCABULARY
    assert cost.forward_peak_bytes.per_sample == pytest.approx(forward * logits, rel=0.02)
    assert cost.backward[0].live[0].per_sample == pytest.approx(backward * logits, rel=0.02)
    assert cost.saved_bytes.per_sample == pytest.approx(logits, rel=0.02)


def test_fused_kernels_have_the_chunks_of_torch(profile):
    tokens, width, words = CHUNK_TOKENS, 8, 4096
    hidden, weight = (torch.randn(n, width, dtype=torch.bfloat16) for n in (tokens, words))
    labels = torch.zeros(tokens, dtype=torch.int64)
    with Live() as live:  # _fused_linear_for_ppo_fwd
        logits = ((hidden @ weight.t()) / 1.0).to(torch.float32)
        probs = logits.softmax(dim=-1)
        entropy = torch.logsumexp(logits, dim=-1) - torch.sum(probs * logits, dim=-1)
        forward, live.peak = live.peak, live.bytes
        del logits, probs, entropy
        logits = ((hidden @ weight.t()) / 1.0).to(torch.float32)  # _fused_linear_for_ppo_bwd
        probs = logits.softmax(dim=-1)
        one_hot = torch.zeros_like(logits).scatter_(-1, labels.unsqueeze(-1), 1)
        gradient = 0
        gradient += torch.ones(tokens).unsqueeze(-1) * (one_hot - probs)
    cost = with_whole_head(profile, None, 2).costs_of("bf16/checkpointing=1/tp=1/sp=1")[-1]
    tile = tokens * words
    assert cost.forward_peak_bytes.fixed / (tokens * VOCABULARY) == pytest.approx(forward / tile, rel=0.01)
    full = 2 * 2 * VOCABULARY * HIDDEN  # the head's gradient, and that of a chunk
    assert (cost.backward[0].live[0].fixed - full) / (tokens * VOCABULARY) == pytest.approx(live.peak / tile, rel=0.01)


def test_adamw_takes_the_roots_of_all_moments_at_once():
    weights = [torch.randn(256, 256, requires_grad=True) for _ in range(4)]
    optimizer = torch.optim.AdamW(weights, foreach=True)  # torch's choice for CUDA's DTensors
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        with Live() as live:
            optimizer.step()
    assert live.peak == pytest.approx(4 * 4 * 256 * 256, rel=0.01)


def run(*args: str, settings: str = SETTINGS) -> tuple[int, dict]:
    done = CliRunner().invoke(main, ["plan", *CASE, "--method", "grpo", "--rollout", settings, *args, "--json"])
    return done.exit_code, json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> dict:
    code, found = run("--write", str(tmp_path_factory.mktemp("verl") / "out"))
    assert code == 0
    return found


def rows(found: dict) -> dict[str, dict]:
    return {row["name"]: row for row in found["arrangements"]}


def test_phases_are_in_the_order_of_verl(planned):
    found = rows(planned)
    assert set(found) == {"hybrid engine", "optimizer_offload", "param_offload, optimizer_offload"}
    names = ["generate", "old log-probs", "reference log-probs", "train", "checkpoint", "sync weights"]
    assert all(list(row["phases"]) == names for row in found.values())


def test_offloading_moves_the_actor_to_the_host(planned):
    kept, both = (rows(planned)[name] for name in ("hybrid engine", "param_offload, optimizer_offload"))
    share = 4 * PARAMETERS / 4  # float32 weights on four GPUs
    assert kept["phases"]["generate"]["actor weights"] == pytest.approx(share, rel=0.001)
    assert kept["phases"]["generate"]["actor moments"] == pytest.approx(2 * share, rel=0.001)
    assert not {"actor weights", "actor moments"} & both["phases"]["generate"].keys()
    assert "actor weights" in both["phases"]["old log-probs"] and "actor moments" not in both["phases"]["old log-probs"]
    assert both["phases"]["train"]["actor moments"] == kept["phases"]["train"]["actor moments"]
    # the reference is on the host in any case, with gradients, and page-locked: each tensor at most twice its size
    assert "actor weights" not in both["phases"]["reference log-probs"]
    assert 2 * share <= kept["host_bytes"] <= 4 * share
    assert both["host_bytes"] == pytest.approx(1.5 * kept["host_bytes"] + 2 * share, rel=0.001)


def test_plan_and_simulate_agree():
    """A model of two layers, without checkpointing, with four micro batches."""
    script = Path(__file__).parent / "verl_step.py"
    simulated = simulate_script(["torchrun", "--nproc_per_node", "4", str(script)], Cluster("h100-80gb", gpus=4))
    _, found = run("--no-activation-checkpointing", "--model-args", '{"num_hidden_layers": 2}')
    parts = rows(found)["hybrid engine"]["phases"]["train"]
    shared = {"process", "fragmentation", "reference's gathered root"}
    planned = sum(size for kind, size in parts.items() if not kind.startswith("vLLM") and kind not in shared)
    assert planned == pytest.approx(simulated.peak_bytes, rel=0.001)
    scored = simulated.phases[0].end_bytes  # a step begins after the log-probs
    assert scored == pytest.approx(parts["actor weights"] + 2 * ROOT + parts["workspaces"] / 2, rel=0.001)


def test_fsdp_1_leaves_embedding_norm_and_head_gathered(planned):
    phases = rows(planned)["hybrid engine"]["phases"]
    left = {name for name, parts in phases.items() if parts.get("reference's gathered root") == 2 * ROOT}
    assert left == phases.keys() - {"reference log-probs"}
    scored = phases["reference log-probs"]
    assert scored["actor's gathered root"] == scored["gathered parameters"] == 2 * ROOT


def test_fsdp_1_copies_weights_to_send_and_to_save_them(planned):
    """A tied matrix has two names in the state dict. `simulate` has both figures, but for 32 bytes."""
    phases = rows(planned)["hybrid engine"]["phases"]
    assert phases["sync weights"]["copied weights"] == 4 * (PARAMETERS + VOCABULARY * HIDDEN) // 4
    assert phases["checkpoint"]["gathered root"] == 4 * (ROOT + VOCABULARY * HIDDEN)
    assert phases["checkpoint"]["copied parameter"] == 4 * VOCABULARY * HIDDEN // 4


def test_fsdp_1_gathers_all_weights_to_send_adapters():
    _, found = run("--lora", "16")
    sent = found["arrangements"][0]["phases"]["sync weights"]
    blocks = PARAMETERS - ROOT
    assert sent["gathered parameters"] == pytest.approx(4 * PARAMETERS + 4 * blocks / 4, rel=0.03)  # and the adapters


def test_earlier_releases_return_the_weights_to_send_them():
    name = "param_offload, optimizer_offload"
    sync = {}
    for release in ("0.8", "0.9"):
        _, found = run(settings=f"{SETTINGS},trainer_release={release}")
        sync[release] = rows(found)[name]["phases"]["sync weights"]
    assert sync["0.8"].keys() - sync["0.9"].keys() == {"actor weights"}
    assert sync["0.9"]["weight bucket"] == 2**31
    assert sync["0.9"]["gathered parameter"] == 4 * VOCABULARY * HIDDEN  # the embedding in float32


def test_deferred_reduction_keeps_float32_gradients_of_all_weights():
    """verl#7458 measured 4 bytes of each parameter on each of 1 to 8 ranks, beside the bf16 gradients, with FSDP2."""
    peaks = []
    for defers in ("false", "true"):
        _, found = run(settings=f"{SETTINGS},strategy=fsdp2,use_no_sync_for_gradient_accumulation={defers}")
        peaks.append(rows(found)["hybrid engine"]["phases"]["train"]["training step"])
        assert found["arrangements"][0]["layout"]["engine"] == "verl-fsdp2"
        slugs = [finding["slug"] for finding in found["findings"]]
        assert ("full-gradients" in slugs) is (defers == "true")
    assert peaks[1] - peaks[0] == pytest.approx(4 * PARAMETERS * 3 / 4, rel=0.15)  # instead of a quarter


def test_the_script_has_verls_keys(planned):
    (path,) = (Path(name) for name in planned["written"])
    words = [word for line in path.read_text().splitlines() for word in shlex.split(line.rstrip("\\"), comments=True)]
    values = dict(word.split("=", 1) for word in words if "." in word and "=" in word)
    known = (Path(__file__).parent / "verl_keys.txt").read_text().split()
    assert {key for key in values if not key.startswith("data.")} <= set(known)
    prompts, n = int(values["data.train_batch_size"]), int(values["actor_rollout_ref.rollout.n"])
    assert prompts * n == 32 and int(values["actor_rollout_ref.actor.ppo_mini_batch_size"]) == prompts
    assert int(values["data.max_prompt_length"]) + int(values["data.max_response_length"]) == 1024
    assert values["actor_rollout_ref.actor.strategy"] == "fsdp"
    assert values["actor_rollout_ref.actor.kl_loss_coef"] == "0.001"


def test_adapters_keep_the_frozen_weights_in_float32():
    """A published run with rank 16: zerofit's forecast without this was half of the measured resident memory."""
    _, found = run("--lora", "16")
    best = found["arrangements"][0]["phases"]
    assert best["checkpoint"]["actor weights"] == pytest.approx(4 * PARAMETERS / 4, rel=0.03)
    assert "reference log-probs" not in best  # the model without its adapters


@pytest.mark.parametrize(
    ("args", "settings"),
    [
        ((), "trainer=verl,vllm_mode=colocate"),  # TRL's
        ((), "use_fused_kernels=true"),  # verl's
        ((), "trainer=slime"),
        ((), f"{SETTINGS},trainer_release=new"),
        ((), f"{SETTINGS},tensor_model_parallel_size=3"),
        (("--engine", "fsdp2"), SETTINGS),
        (("--zero-stage", "2"), SETTINGS),
        (("--offload", "cpu"), SETTINGS),  # FSDP2's
        ((), f"{SETTINGS},strategy=megatron"),
    ],
)
def test_what_makes_no_sense_is_refused(args, settings):
    code, found = run(*args, settings=settings)
    assert code == 2 and found["error"]["hint"]


def test_other_methods_are_refused():
    done = CliRunner().invoke(main, ["plan", *CASE, "--method", "ppo", "--rollout", "trainer=verl", "--json"])
    assert done.exit_code == 2 and "grpo or rloo" in done.stdout


def test_one_setting_in_two_names_is_refused():
    with pytest.raises(UserError, match="n and num_generations name the same setting"):
        RolloutSettings.read({"trainer": "verl", "n": 4, "num_generations": 8}, "--rollout")


def test_a_release_is_no_number():
    assert JsonObject().convert("release=0.10,beta=0.5", None, None) == {"release": "0.10", "beta": 0.5}
