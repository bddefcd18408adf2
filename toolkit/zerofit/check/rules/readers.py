"""Rules for one reader of the JSON: the Trainer, Accelerate, Lightning or DeepSpeed itself."""

from __future__ import annotations

from zerofit.check.finding import Rule
from zerofit.check.reader import HUGGING_FACE
from zerofit.check.subject import MICRO, TOTAL, ZERO, CheckSubject

GATHER = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"


def _reader(c: CheckSubject, *names: str) -> bool:
    return c.setting.reader in names


READER_RULES = (
    Rule(
        code="zero-missing",
        path="",
        when=lambda c: _reader(c, *HUGGING_FACE) and not c.has(ZERO),
        message="zero_optimization is missing",
        why='Accelerate, which the Trainer uses, stops: "Please specify the ZeRO optimization config in the DeepSpeed '
        'config."',
        fix='add "zero_optimization": {"stage": 0}, or another stage',
        source="accelerate 1.15 utils/dataclasses.py:1329",
    ),
    Rule(
        code="batch-auto",
        path=TOTAL,
        when=lambda c: _reader(c, "accelerate") and c.get(TOTAL) == "auto" and c.get(MICRO) is None,
        message=f'{TOTAL} is "auto" without {MICRO}',
        why='Accelerate stops: "`train_batch_size` not found in kwargs"; it computes it from the micro batch',
        fix=f'add "{MICRO}": "auto"',
        source="accelerate 1.15 accelerator.py:2168-2225",
    ),
    Rule(
        code="clipping-default",
        severity="warning",
        path="",
        when=lambda c: (
            _reader(c, *HUGGING_FACE)
            and not c.has("gradient_clipping")
            and not any(asked.path == "gradient_clipping" for asked in c.setting.asked)
        ),
        message="gradient_clipping is missing",
        why="DeepSpeed clips gradients to norm 1.0, whatever the Trainer's max_grad_norm is",
        fix='add "gradient_clipping": "auto" to use max_grad_norm',
        source="runtime/constants.py:203",
    ),
    Rule(
        code="gather-weights",
        severity="warning",
        path=f"{ZERO}.stage",
        when=lambda c: (
            c.stage == 3 and _reader(c, *HUGGING_FACE, "deepspeed", "lightning") and c.get(GATHER) in (None, False)
        ),
        message="ZeRO stage 3 without stage3_gather_16bit_weights_on_model_save",
        why="save_16bit_model and the Trainer's save_model write no weights, only the checkpoint's shards",
        fix="set it to true, or run zero_to_fp32.py on a checkpoint",
        source="runtime/engine.py:5608",
    ),
    Rule(
        code="lightning-contiguous",
        path="activation_checkpointing.contiguous_memory_optimization",
        when=lambda c: _reader(c, "lightning") and c.on("activation_checkpointing.contiguous_memory_optimization"),
        message="contiguous_memory_optimization in a file for Lightning",
        why="Lightning does not pass the number of layers to deepspeed.checkpointing.configure, and DeepSpeed stops: "
        '"Must specify the number of layers with contiguous memory checkpointing"',
        source="lightning pytorch/strategies/deepspeed.py, _set_deepspeed_activation_checkpointing",
    ),
    Rule(
        code="lightning-accumulation",
        path="gradient_accumulation_steps",
        when=lambda c: _reader(c, "lightning") and c.has("gradient_accumulation_steps"),
        message="gradient_accumulation_steps in a file for Lightning",
        why='Lightning stops: "Do not set `gradient_accumulation_steps` in the DeepSpeed config"',
        fix="remove it, and set the Trainer's accumulate_grad_batches",
        source="lightning pytorch/strategies/deepspeed.py, _format_batch_size_and_grad_accum_config",
    ),
)
