"""What depends on the program that reads a file: the guess, "auto", strict JSON, and values given beside it."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from click.testing import CliRunner

from zerofit.app.checking import check as check_file
from zerofit.check.check import check, mend
from zerofit.check.document import of_data, parse
from zerofit.check.reader import READERS, guess
from zerofit.check.subject import TargetHardware
from zerofit.cli.main import main
from zerofit.config.ds_json import parse_text
from zerofit.spec.errors import UserError
from zerofit.spec.run import Run

TRAINER = {"train_batch_size": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}
PLAIN = {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}


def found(config: dict, reader: str, **setting) -> dict[str, str]:
    """Return code and severity of what is wrong."""
    return {f.code: f.severity for f in check(of_data(config), TargetHardware(reader=reader, **setting))}


def test_the_guess_goes_by_what_stands_in_the_file():
    assert guess(TRAINER).name == "trainer" and "auto" in guess(TRAINER).sentences()[0]
    assert guess(PLAIN).name == "deepspeed"
    ours = guess({**TRAINER, "sequence_parallel_size": "auto"})
    assert ours.name == "zerofit" and "sequence_parallel_size" in ours.sentences()[0]
    neox = PLAIN | {"num-layers": 12, "hidden-size": 768, "pos-emb": "rotary"}
    assert guess(neox).name == "neox"
    assert found(neox, "neox") == {}
    assert "unknown-key" in found(neox, "deepspeed")


def test_gpt_neox_hands_some_of_its_arguments_on():
    """What stands there is what megatron/neox_arguments makes of it: deepspeed_config and calculate_derived."""
    ours = PLAIN | {"num-layers": 12, "pipe-parallel-size": 2, "precision": "bfloat16", "vocab-siez": 1}
    ours |= {"optimizer": {"type": "sm3", "params": {"lr": 1e-4}}, "gradient-clipping": 1.0}
    assert found(ours, "neox") == {"neox-argument": "warning"}  # it makes the optimizer itself
    text = '{"num-layers": 1, "pos-emb": "rotary", "precision": "bfloat16",\n"fp16": {"enabled": true, "fp16": true},\n'
    text += '"train-micro-batch-size-per-gpu": "x",\n"deepspeed_extra_args": {"zero_optimisation": {}}}'
    faults = {(f.code, f.line) for f in check(parse(text), TargetHardware(reader="neox"))}
    assert faults >= {("unknown-key", 2), ("fp16-and-bf16", 2), ("wrong-type", 3), ("unknown-key", 4)}
    neox = ours | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "model-parallel-size": 1}
    neox["pos-emb"] = "rotary"
    assert "batch-identity" not in {f.code for f in check_file(neox, Run(ranks=8)).findings}  # 4 hold data
    assert "batch-identity" in {f.code for f in check_file(neox, Run(ranks=16)).findings}


@pytest.mark.parametrize(
    "fp16",
    [{"enabled": "true"}, {"enabled": 1}, True, {"enable": True}, {"enabled": True, "loss_scale": "abc"}],
    ids=json.dumps,
)
def test_an_error_next_to_a_combination_does_not_hide_it(fp16):
    codes = found(PLAIN | {"fp16": fp16, "bf16": {"enabled": True}}, "deepspeed")
    assert "fp16-and-bf16" in codes and len(codes) >= 2


def test_a_fix_with_one_meaning_changes_what_the_rules_see():
    offloaded = {"offload_param": {"device": "cpu"}}
    for zero in ({"stage": "3"}, {"stage": 3}):  # 3 in quotes is not stage 0
        assert "offload-param-stage" not in found(PLAIN | {"zero_optimization": zero | offloaded}, "deepspeed")
    below = found(PLAIN | {"zero_optimization": {"stage": "2"} | offloaded}, "deepspeed")
    assert below == {"number-as-string": "error", "offload-param-stage": "error"}
    misspelt = parse('{"train_batch_size": 8,\n"zero_optimisation": {"stage": 2,\n"offload_param": {"device": "cpu"}}}')
    faults = check(misspelt, TargetHardware(reader="deepspeed"))
    assert {(f.code, f.line, f.path) for f in faults} == {
        ("unknown-key", 2, "zero_optimisation"),
        ("offload-param-stage", 3, "zero_optimisation.offload_param"),
    }


def test_rules_ignore_a_value_without_a_clear_meaning():
    for wrong in ("three", 7, [2]):
        zero = {"stage": wrong, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
        assert set(found(PLAIN | {"zero_optimization": zero}, "deepspeed")) <= {"not-allowed", "wrong-type"}
    result = check_file({"train_batch_size": "many", "zero_optimization": {"stage": "3"}})
    assert result.allowed_ranks == "" and {row.status for row in result.explain()} >= {"wrong"}


NEOX = """# merged with local_setup.yml
{
   "pipe_parallel_size": 1,
   "num_layers": 12,   # layers
   "scaled_masked_softmax_fusion": True,
   "precision": bfloat16,
   "zero_optimization": {
    "stage": 0,
    "overlap_com": True,
    "reduce_bucket_size": "500000000",
  },
   "fp16": {"fp16": true, "loss_scale": 1e-5,},
   "eps": 1.0e-8,
}
"""


def test_a_file_for_gpt_neox_is_read_as_the_yaml_that_it_is(tmp_path):
    path = tmp_path / "125M.yml"
    path.write_text(NEOX)
    result = check_file(path)
    assert result.reader.name == "neox"
    assert result.document.config == yaml.load(NEOX, Loader=yaml.FullLoader)  # as megatron/neox_arguments reads it
    faults = {f.path: (f.code, f.line, f.column, f.fix) for f in result.findings}
    assert faults["zero_optimization.overlap_com"] == ("unknown-key", 9, 5, "did you mean overlap_comm?")
    assert faults["fp16.fp16"] == ("unknown-key", 12, 13, "remove it")
    assert faults["fp16.loss_scale"][:3] == ("number-as-string", 12, 27)  # YAML takes 1e-5 for a word
    fixed = yaml.safe_load(result.fixed())
    assert fixed["zero_optimization"] == {"stage": 0, "overlap_comm": True, "reduce_bucket_size": 500000000}
    assert result.fixed().count("\n") == NEOX.count("\n") and "# layers" in result.fixed()
    assert "yaml" in {f.code for f in check_file(path, reader="trainer").findings}


def test_a_part_of_gpt_neox_files_and_one_in_block_style(tmp_path):
    part = tmp_path / "local_setup.yml"
    part.write_text('{ "vocab_file": "v.json", "save": "ckpt", "use_wandb": False }')
    assert (check_file(part).reader.name, check_file(part).findings) == ("neox", ())
    block = tmp_path / "block.yml"
    block.write_text("pipe-parallel-size: 1\nnum-layers: 2\nhidden-size: 8\nzero_optimization:\n  stag: 1\n")
    (one,) = [f for f in check_file(block).findings if f.code == "unknown-key"]
    assert (one.path, one.line, one.column, one.edits) == ("zero_optimization.stag", 5, 3, ())
    block.write_text("num-layers: 2\nhidden-size: [8\nseq-length: 1\n")
    with pytest.raises(UserError, match="is not valid YAML at line 3"):
        check_file(block)


FSDP = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"


@pytest.mark.parametrize(
    ("text", "name", "hint"),
    [
        (FSDP, "Accelerate", "distributed_type is FSDP"),
        ("{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 2}}", "Accelerate", "--accelerate-config"),
        ("base_model: m\nmicro_batch_size: 2\ndatasets:\n  - path: d\ndeepspeed: z.json\n", "axolotl", "z.json"),
        ("model_name_or_path: m\nstage: sft\nfinetuning_type: lora\n", "LLaMA-Factory", "names no DeepSpeed JSON"),
        ('{"model_name_or_path": "m", "finetuning_type": "lora", "deepspeed": "z.json"}', "LLaMA-Factory", "z.json"),
        ('{"architectures": ["A"], "model_type": "llama"}', "config.json", "zerofit plan FOLDER"),
        ("output_dir: o\nnum_train_epochs: 3\n", "Trainer", "names no DeepSpeed JSON"),
    ],
)
def test_files_of_other_programs_are_named(tmp_path, text, name, hint):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=name) as caught:
        check_file(path)
    assert hint in caught.value.problems[0].hint


def test_a_json_with_keys_of_its_program_stays_a_deepspeed_json(tmp_path):
    own = {"model_name_or_path": "m", "output_dir": "o", "seed": 42, "num_epochs": 5, "num_workers": 4, "stage": 2}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(PLAIN | own))
    result = check_file(path)
    assert [(f.path, f.code, f.severity) for f in result.findings] == [(key, "own-key", "warning") for key in own]
    assert result.fixed() == result.document.text


@pytest.mark.parametrize(
    ("config", "path", "fix", "moved"),
    [
        ({"tensor_parallel": {"enabled": True}}, "tensor_parallel.enabled", "remove it", False),
        ({"overlap_comm": True}, "overlap_comm", "it belongs to zero_optimization", True),
        ({"zero_optimization": {"device": "cpu"}}, "zero_optimization.device", "offload_optimizer or", False),
        ({"zero_optimization": {"gradient_clipping": 0.5}}, "zero_optimization.gradient_clipping", "the top", True),
        ({"cpu_checkpointing": True}, "cpu_checkpointing", "it belongs to activation_checkpointing", False),
        ({"bf16": {"loss_scale": 2.0}}, "bf16.loss_scale", "it belongs to fp16", False),
        ({"wandb": {"enabled": False}, "team": "x"}, "team", "it belongs to wandb", False),
        ({"batch_size": 4}, "batch_size", "keep it if your program reads it", False),
    ],
)
def test_hints_are_sensible_and_moves_certain(config, path, fix, moved):
    document = of_data({"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}} | config)
    (one,) = [f for f in check(document, TargetHardware(reader="deepspeed")) if f.path == path]
    assert fix in one.fix
    assert bool(one.edits) == moved


@pytest.mark.parametrize(
    ("path", "value", "fails"),
    [("gradient_clipping", "auto", True), ("zero_optimization", {"stage": 2, "reduce_bucket_size": "auto"}, False)],
)
def test_plain_deepspeed_fails_on_auto_or_takes_its_default(path, value, fails):
    from deepspeed.runtime.config import DeepSpeedConfig

    config = PLAIN | {path: value}
    assert "auto-unfilled" not in found(config, "trainer")
    assert found(config, "deepspeed")["auto-unfilled"] == ("error" if fails else "warning")
    theirs = DeepSpeedConfig(json.loads(json.dumps(config)))  # the engine divides by the word later
    if fails:
        with pytest.raises(TypeError):
            _ = theirs.gradient_clipping > 0.0
    else:
        assert theirs.zero_config.reduce_bucket_size == 500_000_000


def test_a_guessed_trainer_is_told_once_what_plain_deepspeed_does(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(TRAINER | {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}))
    done = CliRunner().invoke(main, ["check", str(path), "--strict"])
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert 'the "auto" of 3 keys; plain DeepSpeed stops at 2 of them (train_batch_size, gradient_clipping)' in text
    assert "uses its default for 1 of them" in text
    assert f"{path}: nothing wrong" in text


def test_accelerate_wants_zero_and_says_so(tmp_path):
    from accelerate.utils import DeepSpeedPlugin

    config = {"train_batch_size": "auto", "gradient_clipping": "auto"}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="Please specify the ZeRO optimization config"):
        DeepSpeedPlugin(hf_ds_config=str(path))
    for reader in READERS:
        assert ("zero-missing" in found(config, reader)) == (reader in ("trainer", "accelerate"))


def test_defaults_that_surprise_the_trainer():
    assert found({k: v for k, v in TRAINER.items() if k != "gradient_clipping"}, "trainer") == {
        "clipping-default": "warning"
    }
    stage3 = TRAINER | {"zero_optimization": {"stage": 3}}
    assert found(stage3, "trainer") == {"gather-weights": "warning"}
    assert found(stage3, "zerofit") == {}
    # an old name of the key is the key
    old = TRAINER | {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}}
    assert set(found(old, "trainer")) == {"deprecated-key"}


def test_lightning_sets_the_accumulation_itself():
    assert found(PLAIN | {"gradient_accumulation_steps": 1}, "lightning") == {"lightning-accumulation": "error"}


def test_lightning_configures_activation_checkpointing(monkeypatch):
    from deepspeed.runtime.activation_checkpointing import checkpointing

    for name in ("PARTITION_ACTIVATIONS", "CONTIGUOUS_CHECKPOINTING", "num_layers", "deepspeed_checkpointing_enabled"):
        monkeypatch.setattr(checkpointing, name, getattr(checkpointing, name))
    with pytest.raises(AssertionError, match="number of layers"):  # as Lightning's strategy calls it
        checkpointing.configure(mpu_=None, partition_activations=True, contiguous_checkpointing=True)
    section = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 4}
    config = PLAIN | {"activation_checkpointing": section}
    assert found(config, "lightning") == {"lightning-contiguous": "error"}
    assert found(config, "deepspeed") == {"activations-partition": "warning"}


def test_an_offloaded_optimizer_of_the_code():
    config = PLAIN | {"zero_optimization": {"stage": 2, "cpu_offload": True}}
    assert "offload-own-optimizer" in found(config, "deepspeed")
    for forced in (False, True):  # either way the file's author knows which optimizer the code has to bring
        assert "offload-own-optimizer" not in found(config | {"zero_force_ds_cpu_optimizer": forced}, "deepspeed")


def test_activations_on_the_host_are_zerofits_to_put_there():
    config = PLAIN | {"activation_checkpointing": {"cpu_checkpointing": True}}
    for reader in ("deepspeed", "trainer", "accelerate"):
        assert found(config, reader).get("activations-host") == "warning"
    assert not found(config, "zerofit") and not found(config, "lightning")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            '{"train_batch_size": 8, # 8\n "zero_optimization": {"stage": 0}, "gradient_clipping": 1.0}',
            "json-comment",
        ),
        ('{"train_batch_size": 8, "zero_optimization": {"stage": 0}, "gradient_clipping": 1.0,}', "trailing-comma"),
        ('{"train_batch_size": 8, zero_optimization: {"stage": 0}, "gradient_clipping": 1.0}', "hjson"),
        ("train_batch_size: 8  \nzero_optimization: {stage: 0}\ngradient_clipping: 1.0\n", "hjson"),
    ],
)
def test_only_deepspeed_itself_reads_loose_json(tmp_path, text, code):
    from deepspeed.runtime.config import DeepSpeedConfig

    path = tmp_path / "ds.json"
    path.write_text(text)
    assert DeepSpeedConfig(str(path)).train_batch_size == 8
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    document = parse_text(text)
    assert [(f.code, f.severity) for f in check(document, TargetHardware(reader="trainer"))] == [(code, "error")]
    assert "error" not in {f.severity for f in check(document, TargetHardware(reader="deepspeed"))}


def test_a_yaml_is_named_for_what_it_is(tmp_path):
    """DeepSpeed's reader takes a section of it for a word, `enabled: true`."""
    path = tmp_path / "ds.yaml"
    path.write_text("train_batch_size: 8\noptimizer: {type: AdamW, params: {lr: 1e-4}}\nfp16:\n  enabled: true\n")
    found = {(f.code, f.severity, f.line) for f in check_file(path).findings}
    assert found >= {("yaml", "error", 1), ("number-as-string", "error", 2)}  # PyYAML reads 1e-4 as a string
    path.write_text("epochs: 8\nfp16:\n  enabled: true\n")
    with pytest.raises(UserError, match="looks like YAML"):
        check_file(path)
    path.write_text("trainer:\n  devices: 4\n  strategy: deepspeed_stage_2\n")
    with pytest.raises(UserError, match="Lightning"):
        check_file(path)


def test_merged_keys_of_a_yaml_are_no_duplicates(tmp_path):
    path = tmp_path / "ds.yaml"
    merged = "base: &base\n  stage: 7\n  overlap_comm: true\nzero_optimization:\n  <<: *base\n  stage: 2\n"
    path.write_text("num_layers: 2\nhidden_size: 8\ntrain_batch_size: 8\n" + merged)
    result = check_file(path)
    assert result.document.config == yaml.safe_load(path.read_text())
    assert {f.code for f in result.findings} == {"neox-argument"}  # `base`


def test_settings_within_training_arguments_are_checked_with_them(tmp_path):
    path = tmp_path / "args.yaml"
    inner = "deepspeed:\n  bf16: {enabled: false}\n  zero_optimization: {stage: 3, overlapcomm: true}\n"
    path.write_text("output_dir: out\nper_device_train_batch_size: 2\nbf16: true\n" + inner)
    faults = {f.path: (f.code, f.line) for f in check_file(training_args=path).errors}
    assert faults["bf16.enabled"] == ("flag-differs", 5)
    assert faults["zero_optimization.overlapcomm"] == ("unknown-key", 6)
    with pytest.raises(UserError) as caught:
        check_file(path)
    assert f"--training-args {path}" in caught.value.problems[0].hint


@pytest.mark.parametrize(("encoding", "takes"), [("utf-16", False), ("utf-16-le", False), ("utf-8-sig", True)])
def test_encodings_that_programs_do_not_read(tmp_path, encoding, takes):
    from deepspeed.runtime.config import DeepSpeedConfig

    path = tmp_path / "ds.json"
    path.write_bytes(json.dumps(PLAIN).encode(encoding))
    try:
        taken = DeepSpeedConfig(str(path)).train_batch_size == 8
    except ValueError:  # of the encoding, or of hjson
        taken = False
    assert taken == takes
    severities = {r: {f.code: f.severity for f in check_file(path, reader=r).findings} for r in READERS}
    assert severities["deepspeed"]["encoding"] == ("warning" if takes else "error")
    assert severities["trainer"]["encoding"] == "error"
    with pytest.raises((UnicodeDecodeError, json.JSONDecodeError)), path.open(encoding="utf-8") as file:
        json.load(file)
    assert "encoding" not in severities["zerofit"]


def test_a_byte_that_is_no_text_is_named_with_its_place(tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes('{"train_batch_size": 8,\n "é": 1}'.encode("latin-1"))
    with pytest.raises(UserError) as caught:
        check_file(path)
    assert caught.value.problems[0].where == f"{path}:2:3"
    assert "byte 0xe9 is not UTF-8; save the file as UTF-8" in str(caught.value)


@pytest.mark.parametrize("word", ["5", "5.0", " 5 ", "+5", "1_0", "5e8", "1E6", "5.", "5.0e1"])
def test_deepspeed_converts_only_words_that_pydantic_reads_as_integers(word):
    from deepspeed.runtime.config import DeepSpeedConfig

    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": word}}
    try:
        taken = DeepSpeedConfig(config).zero_config.reduce_bucket_size == float(word)
    except ValueError:
        taken = False
    (finding,) = [f for f in check(of_data(config), TargetHardware(reader="deepspeed")) if f.code == "number-as-string"]
    assert (finding.effect == "stops") != taken


def test_values_given_beside_the_file():
    config = {"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "bf16": {"enabled": True}}
    run = Run(ranks=1, micro_batch=1, gradient_accumulation_steps=4, lr=3e-4, precision="fp16")
    differing = [f.path for f in check_file(config, run).findings if f.code == "flag-differs"]
    assert sorted(differing) == ["bf16.enabled", "optimizer.params.lr", "train_batch_size"]
    same = Run(ranks=8, micro_batch=1, gradient_accumulation_steps=4, lr=1e-4, precision="bf16")
    assert not [f for f in check_file(config, same).findings if f.code == "flag-differs"]


@pytest.mark.parametrize(
    ("scheduler", "params", "sets"),
    [
        ("WarmupDecayLR", {"total_num_steps": 9}, True),  # up to 0.001
        ("WarmupDecayLR", {"total_num_steps": 9, "warmup_max_lr": None}, False),
        ("WarmupLR", {"warmup_max_lr": 1e-4, "warmup_type": None}, True),
        ("WarmupLR", {"warmup_num_steps": 4}, False),
        ("WarmupCosineLR", {"total_num_steps": 9}, False),
        (
            "OneCycle",
            {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-4, "cycle_second_stair_count": None, "cycle_momentum": None},
            True,
        ),
        ("LRRangeTest", {"lr_range_test_staircase": None}, True),
    ],
)
def test_a_learning_rate_of_zero_needs_a_scheduler_that_sets_it(scheduler, params, sets):
    """SafeAILab/EAGLE trains with WarmupDecayLR and 0; WarmupCosineLR multiplies (runtime/lr_schedules.py:941)."""
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    schedule = getattr(lr_schedules, scheduler)(optimizer, **params)
    for _ in range(3):
        schedule.step()
    assert bool(optimizer.param_groups[0]["lr"]) == sets
    config = PLAIN | {"optimizer": {"type": "AdamW", "params": {"lr": 0, "weight_decay": 0.1}}}
    assert set(found(config, "deepspeed")) == {"optimizer-value"}
    config |= {"scheduler": {"type": scheduler, "params": params}}
    codes = found(config, "deepspeed").keys() & {"optimizer-value", "scheduler-value", "scheduler-onecycle-momentum"}
    assert codes == (set() if sets else {"optimizer-value"})


def test_batch_sizes_say_which_ranks_they_allow():
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    (one,) = [f for f in check_file(sizes).findings if f.code == "batch-ranks"]
    assert "ranks: 4" in one.message
    assert "batch-ranks" not in found(sizes, "deepspeed", ranks=4)
    assert "batch-identity" in found(sizes, "deepspeed", ranks=8)
    alone = check_file({"train_batch_size": 24, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0})
    assert not alone.findings and alone.allowed_ranks == "12 or a divisor of it" == alone.to_dict()["allowed_ranks"]
    assert check_file({"train_batch_size": 24}, Run(ranks=8)).allowed_ranks == ""
    both_null = {"train_batch_size": None, "train_micro_batch_size_per_gpu": None}
    assert "batch-missing" in found(both_null, "deepspeed")


@pytest.mark.parametrize(
    "old",
    [
        {"bfloat16": {"enabled": True}, "fp16": {"enabled": True}},
        {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
    ],
)
def test_rules_see_old_names(old):
    assert "fp16-and-bf16" in found(PLAIN | old, "deepspeed")


def test_an_offload_of_2020_is_an_offload():
    config = PLAIN | {"zero_optimization": {"stage": 0, "cpu_offload": True}}
    document = of_data(config)
    (one,) = [f for f in check(document, TargetHardware()) if f.code == "offload-without-zero"]
    assert one.path == "zero_optimization.cpu_offload"
    assert document.text.splitlines()[one.line - 1].strip().startswith('"cpu_offload"')


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"zero_optimization": {"stage": 2, "aio": {"block_size": 1}}}, {"aio": {"block_size": 1}}),
        ({"zero_optimization": {"stage": 3, "fp16": {"enabled": True}}}, {"fp16": {"enabled": True}}),
        ({"optimizer": {"type": "SGD", "params": {"lr": 1, "max_grad_norm": 0.5}}}, {"gradient_clipping": 0.5}),
        ({"zero_optimisation": {"stage": "2"}}, {"zero_optimization": {"stage": 2}}),
        ({"elasticity": {"enabled": False, "max_train_batch_size": 9}}, {}),
        ({"zero_optimization": {"stage": 2, "stage3_max_live_params": 5}}, {}),
    ],
)
def test_a_fix_moves_renames_and_corrects_types(config, expected):
    from deepspeed.runtime.config import DeepSpeedConfig

    document = of_data({"train_batch_size": 1} | config)
    fixed = parse(mend(document, TargetHardware(reader="deepspeed"))).config
    assert expected.items() <= fixed.items()
    DeepSpeedConfig(fixed)


@pytest.mark.parametrize(
    "config",
    [
        {"fp16": {"enabled": True, "opt_level": "O2"}},
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1}}},
        {"elasticity": {"enabled": True}},
        {"gradient_clip_norm_of_all": 1.0},
        {"zero_optimization": {"stage": 2, "stage3_gather_16bit_weights_on_model_save": True}},
        {"fp16": {"enabled": True, "min_loss_scale": 1e-10}},
    ],
)
def test_a_fix_decides_nothing(config):
    document = of_data({"train_batch_size": 8} | config)
    assert mend(document, TargetHardware(reader="deepspeed")) == document.text
