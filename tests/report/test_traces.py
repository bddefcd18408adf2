"""Traces of GPUs, written by hand as torch.profiler writes them, and files that are none."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from zerofit.cli.main import main
from zerofit.report.traces import Part, kind_of, measured_kernels, read_trace
from zerofit.spec.errors import UserError
from zerofit.spec.profiling import SECTION_MARK, STEP_MARK, Numbers


def event(name: str, cat: str, ts: float, dur: float, **args: object) -> dict:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": 1, "args": args}


def test_kernels_belong_to_the_module_that_launched_them(tmp_path):
    events = [
        event(f"{STEP_MARK}4", "user_annotation", 0, 100),
        event(f"{STEP_MARK}5", "user_annotation", 100, 100),
        event(f"{SECTION_MARK}forward|block.0", "user_annotation", 1, 0),
        event("cudaLaunchKernel", "cuda_runtime", 2, 1, correlation=7),
        event(f"{SECTION_MARK}forward|block.1", "user_annotation", 10, 0),
        event("cudaLaunchKernel", "cuda_runtime", 11, 1, correlation=8),
        event("aten::mm", "cpu_op", 11, 5),
        event("cudaLaunchKernel", "cuda_runtime", 12, 1, correlation=9),
        event(f"{SECTION_MARK}step|", "user_annotation", 20, 0),
        event("cudaLaunchKernel", "cuda_runtime", 21, 1, correlation=10),
        event("ampere_bf16_s16816gemm_bf16_128x128", "kernel", 30, 40, correlation=7),
        event("sm80_xmma_gemm_bf16bf16", "kernel", 70, 20, correlation=8),
        event("ncclDevKernel_AllGather_RING_LL(ncclDevComm*)", "kernel", 70, 60, correlation=9),
        event("multi_tensor_apply_kernel<adam>", "kernel", 140, 8, correlation=10),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = read_trace(path)
    assert (found.forecast, found.on_device, found.step_s) == (False, True, pytest.approx(1e-4))
    assert found.parts == pytest.approx(
        {
            Part("block", "product"): 30e-6,
            Part("", "all-gather"): 30e-6,
            Part("", "optimizer"): 4e-6,
        }  # of one of two steps
    )


def test_shapes_give_kernels_what_they_computed(tmp_path):
    types = {"Input type": ["c10::BFloat16", "c10::BFloat16", "c10::BFloat16"]}
    heads = [[2, 8, 64, 16], [2, 4, 64, 16], [2, 4, 64, 16], [], []]
    events = [
        event("aten::addmm", "cpu_op", 0, 5, **{"External id": 3, "Input Dims": [[32], [128, 64], [64, 32]], **types}),
        event("gemm", "kernel", 9, 8, **{"External id": 3}),
        event("splitk", "kernel", 17, 2, **{"External id": 3}),
        event("aten::bmm", "cpu_op", 5, 1, **{"External id": 4, "Input Dims": [[6, 8, 4], [6, 4, 2]], **types}),
        event("gemm", "kernel", 20, 4, **{"External id": 4}),
        event(
            "aten::_scaled_dot_product_flash_attention",
            *("cpu_op", 6, 1),
            **{"External id": 5, "Input Dims": heads, "Concrete Inputs": ["", "", "", "0.", "True"], **types},
        ),
        event("flash_fwd_kernel", "kernel", 24, 16, **{"External id": 5}),
        event("aten::mm", "cpu_op", 7, 1, **{"External id": 6}),  # without shapes
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = [(k.kind, k.shape, k.flops, k.causal, pytest.approx(1e6 * k.seconds)) for k in measured_kernels(path)]
    assert found == [
        ("product", (128, 32, 64), 2 * 128 * 32 * 64, False, 10.0),
        ("product", (8, 2, 4), 2 * 6 * 8 * 2 * 4, False, 4.0),
        ("attention", (16, 64, 64, 16), 4 * 16 * 64 * 64 * 16, True, 16.0),
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("op", ["efficient_attention", "cudnn_attention"])
def test_log_sums_of_a_forward_are_no_causal_mask(tmp_path, op, causal):
    """In training, both ops compute the sums for their backward."""
    values = ["", "", "", "", "True", "0.", str(causal)]
    arguments = {
        "Input Dims": [[2, 8, 64, 16]] * 3 + [[]] * 4,
        "Input type": ["c10::Half"] * 3,
        "Concrete Inputs": values,
    }
    path = tmp_path / "trace.json"
    path.write_text(
        json.dumps({"traceEvents": [event(f"aten::_scaled_dot_product_{op}", "cpu_op", 0, 5, **arguments)]})
    )
    assert [kernel.causal for kernel in measured_kernels(path)] == [causal]
    schema = getattr(torch.ops.aten, f"_scaled_dot_product_{op}").default._schema
    assert [argument.name for argument in schema.arguments][4:7:2] == ["compute_log_sumexp", "is_causal"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::convolution_backward", "convolution"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("aten::_scaled_dot_product_flash_attention", "attention"),
        ("aten::native_layer_norm_backward", "normalisation"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("gloo:all_reduce", "all-reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce-scatter"),
        ("aten::silu", "elementwise"),
    ],
)
def test_kinds_of_names(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no JSON", "expecting value"),
        ("[]", "expected an object, got a list"),
        ('{"traceEvents": []}', "no steps"),
        ('{"other": 1}', "no list `traceEvents`"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": "1", "dur": 1}]}', 'event 1 of phase "X" lacks a name'),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": NaN}]}', 'event 1 of phase "X" lacks a name'),
        ('{"traceEvents": [], "otherData": {"made_by": "zerofit"}}', "lacks step_s"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text, why):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(UserError, match=f"cannot read {path}.*{why}") as found:
        read_trace(path, "--from-trace")
    assert [problem.where for problem in found.value.problems] == ["--from-trace"]


@pytest.mark.parametrize("words", [[], ["run", "--trace", "a.json"], ["--trace", "a.json", "--trace", "b.json"]])
def test_bad_input_ends_with_exit_code_2(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(main, ["plot", *words]).exit_code == 2


def test_numbers_of_steps_and_ranks():
    assert [n for n in range(12) if n in Numbers.parse("3-5, 9")] == [3, 4, 5, 9]
    for text in ("", "5-3", "a", "1-", "-1", "1.5"):
        with pytest.raises(ValueError, match="like 3-5"):
            Numbers.parse(text)
