"""What the program that reads the JSON makes of it: the Trainer, Accelerate, Lightning, DeepSpeed itself."""

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
        message="there is no zero_optimization",
        why='Accelerate, which the Trainer uses, stops: "Please specify the ZeRO optimization config in the DeepSpeed '
        'config."',
        fix='add "zero_optimization": {"stage": 0}, or the stage that you want',
        source="accelerate 1.15 utils/dataclasses.py:1329",
    ),
    Rule(
        code="batch-auto",
        path=TOTAL,
        when=lambda c: _reader(c, "accelerate") and c.get(TOTAL) == "auto" and c.get(MICRO) is None,
        message=f'{TOTAL} is "auto" without {MICRO}',
        why='Accelerate stops: "`train_batch_size` not found in kwargs"; it fills it from the micro batch\'s key',
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
            and not any(one.path == "gradient_clipping" for one in c.setting.asked)
        ),
        message="there is no gradient_clipping",
        why="DeepSpeed clips gradients to the norm 1.0, whatever max_grad_norm the Trainer's arguments have",
        fix='write "gradient_clipping": "auto" for the Trainer\'s max_grad_norm',
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
        why="save_16bit_model, and with it the Trainer's save_model, writes no weights: only the checkpoint's shards",
        fix="set it to true, or make the weights of a checkpoint with zero_to_fp32.py",
        source="runtime/engine.py:5608",
    ),
    Rule(
        code="lightning-contiguous",
        path="activation_checkpointing.contiguous_memory_optimization",
        when=lambda c: _reader(c, "lightning") and c.on("activation_checkpointing.contiguous_memory_optimization"),
        message="contiguous_memory_optimization in a file for Lightning",
        why="Lightning hands it to deepspeed.checkpointing.configure without a number of layers, and DeepSpeed stops: "
        '"Must specify the number of layers with contiguous memory checkpointing"',
        source="lightning pytorch/strategies/deepspeed.py, _set_deepspeed_activation_checkpointing",
    ),
    Rule(
        code="lightning-accumulation",
        path="gradient_accumulation_steps",
        when=lambda c: _reader(c, "lightning") and c.has("gradient_accumulation_steps"),
        message="gradient_accumulation_steps in a file for Lightning",
        why='Lightning stops: "Do not set `gradient_accumulation_steps` in the DeepSpeed config"',
        fix="remove it, and give the Trainer's accumulate_grad_batches",
        source="lightning pytorch/strategies/deepspeed.py, _format_batch_size_and_grad_accum_config",
    ),
)
