"""SGD with momentum and weight decay."""

from __future__ import annotations

from zerofit.features.optimizer import SGD_BYTES, LearningRates, OptimizerEntry, States, StepCost

SGD = OptimizerEntry(
    name="sgd",
    json_type="SGD",
    trainer_names=("sgd",),
    docs="4 bytes per parameter: the momentum. ZeRO 0 to 3.",
    # a rate for 256 samples, which grows linearly (Goyal et al., 2017)
    rates=LearningRates(scratch=0.1, pretrained=0.01, adapters=0.1, by_batch="linear"),
    coupled_decay=True,
    momentum=0.9,
    states=States(numbers=1, host_numbers=1),
    # on a GPU torch adds the decay to all gradients of a group at once
    step=StepCost(
        temporary=lambda numel, gpu: 0,
        late=lambda gpu: 0,
        decayed=4,
        group_at_once=True,
        moved_bytes=SGD_BYTES,
        like="sgd",
    ),
)
