"""AdamW, and "Adam", which DeepSpeed treats as AdamW."""

from __future__ import annotations

from zerofit.features.optimizer import JsonRule, LearningRates, OptimizerEntry, StepCost

PARAMS = "optimizer.params"
RULES = (
    JsonRule(
        code="optimizer-amsgrad",
        path=f"{PARAMS}.amsgrad",
        when=f"on(path) and optimizer in ('adam', 'adamw', 'lamb') and not on('{PARAMS}.torch_adam')",
        message="amsgrad with DeepSpeed's own Adam",
        why='DeepSpeed stops: "FusedAdam does not support the AMSGrad variant."',
        fix="remove it, or set torch_adam to true",
        source="ops/adam/fused_adam.py:88",
    ),
    JsonRule(
        code="adam-is-adamw",
        severity="warning",
        path="optimizer.type",
        when=f"optimizer == 'adam' and not has('{PARAMS}.adam_w_mode') and number('{PARAMS}.weight_decay')",
        message="Adam with weight decay",
        why='DeepSpeed treats "Adam" as AdamW: the decay is decoupled from the gradient',
        fix='write "AdamW" for decoupled decay, else add "adam_w_mode": false',
        source="runtime/engine.py:2490",
    ),
    JsonRule(
        code="adamw-mode",
        severity="warning",
        path=f"{PARAMS}.adam_w_mode",
        when="optimizer == 'adamw' and off(path)",
        message="AdamW with adam_w_mode false",
        why='DeepSpeed ignores this key: only the type "Adam" reads it',
        fix='write "Adam" for decay through the gradient',
        source="runtime/engine.py:2490",
        ignored=True,
    ),
)
RATES = LearningRates(
    scratch=1e-3,
    pretrained=2e-5,  # the lowest rate for fine-tuning BERT (Devlin et al., 2019, A.3), usual for language models
    adapters=2e-4,  # of models with 7 to 13 billion parameters (Dettmers et al., 2023, table 9)
    gan=2e-4,  # DCGAN: Radford et al., 2016, section 4
)

ADAMW = OptimizerEntry(
    name="adamw",
    json_type="AdamW",
    same_states=("adam",),
    trainer_names=("adamw_torch", "adamw_torch_fused"),
    docs="8 bytes per parameter. ZeRO 0 to 3, also offloaded.",
    torch_on_cpu=True,
    device_op="FusedAdamBuilder",
    host_op="CPUAdamBuilder",
    zero_tested=True,
    rates=RATES,
    # torch's Adam on a CPU allocates a root and a quotient; DeepSpeed's FusedAdam steps in place
    step=StepCost(temporary=lambda numel, gpu: 0 if gpu else 8 * numel, late=lambda gpu: 0 if gpu else 4, fused=True),
    rules=RULES,
    cycled_betas=True,
)
