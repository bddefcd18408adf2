"""The features of ZeRO, offload and compilation that a DeepSpeed JSON switches on.

`config` refuses combinations. `check` reports stages at which a feature has no effect. `simulate` and `plan` refuse
features that they cannot forecast, and `tune` refuses features that its trials cannot use. `checkpoint` names the
states that a resume loses. `launch` compiles a feature's C++ op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zerofit.features.optimizer import JsonRule

ZERO = "zero_optimization"


@dataclass(frozen=True, kw_only=True)
class Unforecast:
    """The reason why a command cannot forecast a feature, and what to do."""

    message: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class ZeroFeature:
    """A feature, and the settings that it cannot be combined with."""

    path: str  # dotted key in the DeepSpeed JSON
    docs: str  # effect of the feature
    off: tuple[object, ...] = (None, False, 0)  # values that switch it off
    ignored_below_3: str = ""  # what happens instead below ZeRO stage 3
    tested_combined: bool = True  # tested with experts, and with two kinds of parallelism
    tested_frozen: bool = True  # tested with adapters and frozen weights
    keeps_masters: bool = True  # float32 master weights are in memory after each step, so --ema can read them
    tuned: bool = True  # trials of `tune` can have it
    op: str | None = None  # DeepSpeed's builder of its C++ op
    not_simulated: Unforecast | None = None
    not_planned: Unforecast | None = None
    counted: bool = True  # False: plan's formulas lack its effect on memory, time or both, and the answer names it
    unsaved: str = ""  # states of the feature that DeepSpeed does not save
    instead: str = ""  # alternative if these states must be saved

    def on(self, config: Mapping[str, object]) -> bool:
        """Return whether a DeepSpeed JSON switches the feature on."""
        value: object = config
        for key in self.path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value not in self.off

    @property
    def rules(self) -> tuple[JsonRule, ...]:
        """The rules of `zerofit check` about this feature."""
        rule = JsonRule(
            code="feature-stage",
            path=self.path,
            when="stage_is_set and stage < 3 and changed(path)",
            message=f"{self.path.rpartition('.')[2]} at ZeRO stage ${{stage}}",
            why=f"DeepSpeed ignores it below stage 3: {self.ignored_below_3}",
            fix="use stage 3, or remove it",
            source="runtime/engine.py:2749-2788",
            ignored=True,
        )
        return (rule,) if self.ignored_below_3 else ()


# the quantizer's kernels are CUDA code that fake tensors cannot pass (ops/quantizer)
_KERNELS_OF_QUANTIZER = Unforecast(
    message="ZeRO++'s quantized communication cannot be simulated: DeepSpeed's quantizer runs on a GPU only",
    hint="simulate with --ds-config zero3 for an upper bound: it gathers weights and gradients unquantized",
)
ZENFLOW = ZeroFeature(
    path=f"{ZERO}.zenflow",
    docs="The device updates columns with the largest gradients. The host updates the other columns some steps later.",
    off=(None,),
    tested_combined=False,
    tested_frozen=False,
    keeps_masters=False,
    tuned=False,
    not_simulated=Unforecast(
        message="ZenFlow cannot be simulated: DeepSpeed allocates its buffers on a CUDA device by name "
        "(runtime/zenflow/engine_stage3.py:192)",
        hint="simulate with --ds-config zero3_offload, which is the same without ZenFlow",
    ),
    not_planned=Unforecast(
        message="plan cannot forecast zenflow in the DeepSpeed JSON (selected columns, late updates)",
        hint="plan with zero3_offload, the same without zenflow",
    ),
    unsaved="ZenFlow's states of selected columns and its pending gradients",
    instead="the same offload without zenflow",
)
SUPER_OFFLOAD = ZeroFeature(
    path=f"{ZERO}.offload_optimizer.super_offload",
    docs="A separate process updates offloaded states during backward.",
    tested_combined=False,
    tested_frozen=False,
    keeps_masters=False,
    tuned=False,
    unsaved="SuperOffload's optimizer states, which are in a separate process",
    instead="zero3_offload",
)
TWIN_FLOW = ZeroFeature(
    path=f"{ZERO}.offload_optimizer.ratio",
    docs="Twin-Flow: the host updates this share of the parameters, and the device updates the others.",
    off=(None, 1),
    unsaved="the optimizer states of the part on the device",
    instead="offload_optimizer.ratio 1.0",
    counted=False,
)
QUANTIZED_WEIGHTS = ZeroFeature(
    path=f"{ZERO}.zero_quantized_weights",
    docs="ZeRO++: parameters are gathered in 8 bits.",
    ignored_below_3="weights are gathered unquantized",
    tested_combined=False,
    op="QuantizerBuilder",
    not_simulated=_KERNELS_OF_QUANTIZER,
    counted=False,
)
QUANTIZED_FROZEN_WEIGHTS = ZeroFeature(
    path=f"{ZERO}.zero_quantized_nontrainable_weights",
    docs="ZeRO++: frozen parameters are kept in 8 bits.",
    ignored_below_3="weights are kept unquantized",
    op="QuantizerBuilder",
    not_simulated=_KERNELS_OF_QUANTIZER,
    counted=False,
)
QUANTIZED_GRADIENTS = ZeroFeature(
    path=f"{ZERO}.zero_quantized_gradients",
    docs="ZeRO++: gradients are reduced in 4 bits.",
    ignored_below_3="gradients are reduced unquantized",
    tested_combined=False,
    op="QuantizerBuilder",
    not_simulated=_KERNELS_OF_QUANTIZER,
    counted=False,
)
SECONDARY_PARTITION = ZeroFeature(
    path=f"{ZERO}.zero_hpz_partition_size",
    docs="ZeRO++: each node keeps a second partition of the parameters, for backward.",
    # 1 is DeepSpeed's default: a partition of one rank is no partition (runtime/zero/config.py:324).
    off=(None, False, 0, 1),
    ignored_below_3="no secondary partition is kept",
    tested_combined=False,
    counted=False,
)
DEEPCOMPILE = ZeroFeature(
    path="compile.deepcompile",
    docs="ZeRO's gathers and reductions become ops of the compiled graph.",
    tested_combined=False,
    tested_frozen=False,
    op="DeepCompileBuilder",
    counted=False,
)
GRADIENTS_IN_FP32 = ZeroFeature(
    path="data_types.grad_accum_dtype",
    docs="Gradients are accumulated in this type.",
    off=(None, "bf16", "bfloat16", "fp16", "float16"),
    counted=False,
)
TORCH_AUTOCAST = ZeroFeature(
    path="torch_autocast.enabled",
    docs="Weights stay float32. Matrix multiplications compute in 16 bits.",
    not_planned=Unforecast(
        message="plan cannot forecast torch_autocast in the DeepSpeed JSON (float32 weights, activations of two types)",
        hint="use `zerofit simulate` with the same options",
    ),
)
NARROW_MASTERS = tuple(
    ZeroFeature(
        path=f"{half}.{half}_master_weights_and_grads",
        docs=f"Master weights and their gradients are {half} (with bf16_optimizer_states the moments, too).",
        keeps_masters=False,
        not_planned=Unforecast(
            message=f"plan cannot forecast {half}_master_weights_and_grads in the DeepSpeed JSON",
            hint="use `zerofit simulate` with the same options",
        ),
    )
    for half in ("fp16", "bf16")
)
ZERO_FEATURES: tuple[ZeroFeature, ...] = (
    SECONDARY_PARTITION,
    QUANTIZED_WEIGHTS,
    QUANTIZED_FROZEN_WEIGHTS,
    QUANTIZED_GRADIENTS,
    ZENFLOW,
    SUPER_OFFLOAD,
    TWIN_FLOW,
    DEEPCOMPILE,
    GRADIENTS_IN_FP32,
    TORCH_AUTOCAST,
    *NARROW_MASTERS,
)


def features_on(config: Mapping[str, object]) -> Iterator[ZeroFeature]:
    """Yield the features that a DeepSpeed JSON switches on."""
    return (feature for feature in ZERO_FEATURES if feature.on(config))
