"""DeepSpeed's Muon: Muon for matrices, and Adam for all other weights."""

from __future__ import annotations

from collections.abc import Iterator

from zerofit.features.optimizer import (
    JsonRule,
    LearningRates,
    OptimizerEntry,
    Refusal,
    States,
    StepCost,
    TrainingSetting,
)
from zerofit.features.zero import ZERO

RULES = (
    JsonRule(
        code="muon-reduce-scatter",
        path=f"{ZERO}.reduce_scatter",
        when="optimizer == 'muon' and stage == 3 and on(path)",
        message="Muon at ZeRO stage 3 with reduce_scatter (on by default)",
        why='DeepSpeed stops: "Muon and reduce scatter cannot be used together"',
        fix="set reduce_scatter to false",
        source="runtime/zero/stage3.py:361",
        settled=True,
    ),
    JsonRule(
        code="muon-quantized",
        path=f"{ZERO}.zero_quantized_gradients",
        when="optimizer == 'muon' and stage == 3 and on(path)",
        message="Muon with zero_quantized_gradients",
        why='DeepSpeed stops: "Muon and all2all process group cannot be used together"',
        source="runtime/zero/stage3.py:363",
    ),
    JsonRule(
        code="muon-ns-method",
        path="optimizer.params.ns_method",
        when="optimizer == 'muon' and has(path) and value not in ('gram', 'standard', 'auto')",
        message="ns_method is ${value}; allowed: gram, standard",
        why='DeepSpeed stops: "ns_method must be one of ..."',
        fix="use one of them, or remove it (gram)",
        source="runtime/zero/muon/original_muon.py:386",
    ),
)


def _refuses(setting: TrainingSetting) -> Iterator[Refusal]:
    """Yield refusals of clipping under ZeRO, split matrices, and runs that were not verified."""
    if setting.zero_stage and setting.clipping:
        yield Refusal(
            f"gradient clipping {setting.clipping} with muon at ZeRO stage {setting.zero_stage}: DeepSpeed clips "
            "the orthogonalized update. Its norm is always large, so clipping makes every step smaller",
            "use --gradient-clipping 0",
            where="--gradient-clipping",
        )
    if setting.combined and setting.tp > 1:
        yield Refusal(
            "muon orthogonalizes full matrices, but tensor parallel ranks have slices",
            "use another optimizer, or leave --tensor-parallel at 1",
        )
    if setting.ep > 1:
        yield Refusal(
            "muon with --expert-parallel is not supported: it was not verified against training on one device",
            "use another optimizer, or leave --expert-parallel at 1",
        )
    if setting.pp > 1:
        yield Refusal(
            "muon with --pipeline: DeepSpeed cannot find embedding and head by name, so Muon trains them too",
            "use another optimizer, or leave --pipeline at 1",
        )
    if setting.part:
        why = "Muon with frozen weights is not supported: it was not verified against training on one device"
        if setting.part == "--lora":
            why = "Muon orthogonalizes full matrices, but an adapter has two factors of a matrix"
        yield Refusal(f"{setting.part}: {why}", "use --optimizer adamw", kind="conflict")


MUON = OptimizerEntry(
    name="muon",
    json_type="Muon",
    docs="4 bytes per weight of a matrix, 8 bytes per other weight. ZeRO 0 to 3; no pipeline, experts or adapters.",
    torch_on_cpu=True,
    compiled=True,
    # DeepSpeed lists it as tested only if it can import it (runtime/zero/utils.py:71)
    full_gradients=True,
    rates=LearningRates(scratch=0.02, pretrained=0.002, adapters=0.02, by_size=False),
    momentum=0.95,
    clipping=0.0,
    clipping_why="whose update has a fixed norm",
    states=States(numbers=1),
    step=StepCost(temporary=lambda numel, gpu: 8 * numel, late=lambda gpu: 4),
    planned=False,  # the profile does not distinguish matrices that Muon updates from matrices that Adam updates
    refuses=_refuses,
    rules=RULES,
    drops_params=True,
)
