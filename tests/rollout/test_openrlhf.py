"""OpenRLHF: its head against torch, its sleeping states against arithmetic, its script against its flags."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.rollout.live_bytes import Live
from zerofit.cli.main import main
from zerofit.rollout.heads import OPENRLHF

PARAMETERS = 494_032_768
CASE = ("qwen2.5-0.5b", "--gpu", "h100-80gb", "--gpus", "4", "--seq-len", "1024", "--micro-batch", "2")
CASE += ("--global-batch", "32", "--zero-stage", "3", "--offload", "none")
SETTINGS = "trainer=openrlhf,rollout.max_new_tokens=512"


class CrossEntropy(torch.autograd.Function):
    """flash-attn's cross-entropy: only its backward allocates something for each logit, the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits[:, 0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0] * grads[0].unsqueeze(1)


def test_the_head_has_the_logits_of_torch():
    tokens, width, words = 64, 8, 4096
    hidden = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(words, width, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # Actor.forward, which returns its output
        output = {"logits": hidden @ weight.t()}
        output["logits"] = output["logits"].to(torch.float32)
        return CrossEntropy.apply(output["logits"]), output  # pyright: ignore[reportReturnType]

    with Live() as live:
        log_probs, output = forward()
        peaks = [live.peak, live.bytes]
        live.peak = live.bytes
        log_probs.sum().backward()
        peaks.append(live.peak)
    assert output["logits"].dtype == torch.float32
    each = [round(peak / (tokens * words)) for peak in peaks]
    assert each == [OPENRLHF.forward, OPENRLHF.saved, OPENRLHF.backward]


def run(*args: str, settings: str = SETTINGS) -> tuple[int, dict]:
    done = CliRunner().invoke(main, ["plan", *CASE, "--method", "grpo", "--rollout", settings, *args, "--json"])
    return done.exit_code, json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> dict:
    code, found = run("--write", str(tmp_path_factory.mktemp("openrlhf") / "out"))
    assert code == 0
    return found


def test_sleeping_states_are_on_the_host(planned):
    awake, asleep = sorted(planned["arrangements"], key=lambda row: row["name"])
    assert (awake["name"], asleep["name"]) == ("colocate all", "ds.enable_sleep")
    names = ["generate", "old log-probs", "reference log-probs", "train", "sync weights", "checkpoint"]
    assert list(awake["phases"]) == list(asleep["phases"]) == names
    share = 2 * PARAMETERS / 4  # of four ranks, in 16 bits
    for row in (awake, asleep):
        assert row["phases"]["generate"]["actor weights"] == pytest.approx(share, rel=0.001)
        assert row["phases"]["train"]["reference"] == pytest.approx(share, rel=0.001)  # init_coef is 0.01
        assert "vLLM weights" in row["phases"]["checkpoint"]  # awake since the sync
    states = awake["phases"]["generate"]["actor states"]
    # master weights, two moments, gradients in 16 bits, and the bucket into which they are reduced
    assert states == pytest.approx(7 * share + 2 * 50_000_000, rel=0.001)
    assert "actor states" not in asleep["phases"]["sync weights"]
    assert asleep["phases"]["train"]["actor states"] == states
    # vLLM asleep at level 1 has its weights there, too
    assert awake["host_bytes"] >= 2 * PARAMETERS and asleep["host_bytes"] - awake["host_bytes"] == states


def test_an_offloaded_reference_is_on_the_host():
    _, found = run(settings=f"{SETTINGS},ref.offload=true,ds.enable_sleep=false")
    (row,) = found["arrangements"]
    assert "reference" not in row["phases"]["train"] and "reference log-probs" in row["phases"]
    assert row["host_bytes"] == pytest.approx(2 * PARAMETERS * 1.25, rel=0.01)  # vLLM's weights, a quarter of the copy


def test_the_script_has_openrlhfs_flags(planned):
    (path,) = (Path(name) for name in planned["written"])
    words = [word for line in path.read_text().splitlines() for word in shlex.split(line.rstrip("\\"), comments=True)]
    flags = [word.removeprefix("--") for word in words if word.startswith("--")]
    known = (Path(__file__).parent / "openrlhf_flags.txt").read_text().split()
    assert set(flags) <= set(known)
    values = dict(zip(words, [*words[1:], ""], strict=True))
    assert values["--train.batch_size"] == "32" and values["--rollout.batch_size"] == "4"
    assert values["--vllm.num_engines"] == "4" and values["--data.max_len"] == "1024"


@pytest.mark.parametrize(
    ("args", "settings"),
    [
        (("--lora", "8"), SETTINGS),
        ((), "trainer=openrlhf,vllm_mode=server"),
        ((), "trainer=verl,ref.offload=true"),
        ((), "ds.enable_sleep=true"),
    ],
)
def test_what_makes_no_sense_is_refused(args, settings):
    code, found = run(*args, settings=settings)
    assert code == 2 and found["error"]["hint"]
