"""Files beside the JSON: what is read of them, and that it is what the Trainer and Accelerate do with each key."""

from __future__ import annotations

import json
import subprocess

import pytest
import transformers
from torch.torch_version import TorchVersion

import zerofit as zf
from zerofit.check.argument_files import commands, of_mapping, read_argument_file
from zerofit.check.arguments import plugin_config, requested_by
from zerofit.check.catalog import catalog
from zerofit.check.dotted import autos, get
from zerofit.check.effective import effective_config
from zerofit.spec.errors import UserError
from zerofit.spec.run import Run

pytestmark = pytest.mark.versions

FIXED = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 10, "total_num_steps": 100},
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "zero_optimization": {"stage": 2},
}
SAME = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "learning_rate": 1e-4,
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "warmup_steps": 10,
    "max_steps": 100,
    "bf16": True,
}
OTHERS = [
    SAME,
    {"max_steps": 100},  # the defaults
    SAME | {"per_device_train_batch_size": 2},
    SAME | {"per_device_train_batch_size": 2, "auto_find_batch_size": True},
    SAME | {"gradient_accumulation_steps": 4, "max_grad_norm": 1.0},
    SAME | {"learning_rate": 3e-4, "adam_beta1": 0.8, "weight_decay": 0.0, "adam_epsilon": 1e-6},
    SAME | {"warmup_steps": 0.2, "max_steps": 100},
    SAME | {"bf16": False, "bf16_full_eval": True},
    SAME | {"bf16": False},
    SAME | {"max_steps": 50},
]


def all_auto(config: dict) -> dict:
    """Return the same keys with "auto" wherever the Trainer compares."""
    kept = ("type", "warmup_min_lr", "stage")
    return {
        key: all_auto(value) if isinstance(value, dict) else value if key in kept else "auto"
        for key, value in config.items()
    }


def trainers(config: dict, arguments: dict, monkeypatch: pytest.MonkeyPatch):
    """Return what transformers makes of it: the configuration, and the keys that it refuses."""
    from transformers import TrainingArguments, training_args
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)
    args = TrainingArguments(output_dir="out", use_cpu=True, **arguments)
    theirs = HfTrainerDeepSpeedConfig(json.loads(json.dumps(config)))
    theirs.trainer_config_process(args, args.auto_find_batch_size)
    try:
        theirs.trainer_config_finalize(args, None, args.max_steps)
    except ValueError:
        assert theirs.mismatches
    return theirs.config, sorted(line.removeprefix("- ds ").partition("=")[0] for line in theirs.mismatches)


@pytest.mark.parametrize("arguments", OTHERS, ids=str)
@pytest.mark.parametrize("config", [FIXED, all_auto(FIXED)], ids=["fixed", "auto"])
def test_the_trainers_arguments_as_the_trainer_takes_them(config, arguments, monkeypatch):
    filled, refused = trainers(config, arguments, monkeypatch)
    found = zf.check(config, Run(ranks=1), training_args=arguments)
    assert found.reader.name == "trainer"
    assert sorted(f.path for f in found.findings if f.code == "flag-differs") == refused
    assert effective_config(config, catalog(), found.hardware).subject.config == filled
    assert not list(autos(filled))


@pytest.mark.parametrize(("steps", "refused"), [(10, []), (0, ["scheduler.params.warmup_num_steps"])])
def test_warmup_steps_override_the_ratio(steps, refused):
    """So says the documentation of warmup_steps in transformers 4, which had both."""
    arguments = SAME | {"warmup_ratio": 0.5, "warmup_steps": steps}
    found = zf.check(FIXED, Run(ranks=1), training_args=arguments).findings
    assert [f.path for f in found if f.code == "flag-differs"] == refused


def test_what_does_not_reach_deepspeed():
    config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}}
    config |= {"optimizer": {"type": "AdamW", "params": {}}}
    arguments = {"gradient_accumulation_steps": 4, "max_grad_norm": 0.3, "learning_rate": 3e-4, "weight_decay": 0.0}
    unread = [f.path for f in zf.check(config, training_args=arguments).findings if f.code == "flag-unread"]
    # tried with the Trainer: DeepSpeed clips at 1.0, learns with 0.001; the Trainer accumulates by itself
    assert sorted(unread) == ["gradient_clipping", "optimizer.params.lr"]
    whole = config | {"gradient_clipping": "auto"}
    whole["optimizer"] = {"type": "AdamW", "params": {"lr": "auto"}}
    assert not zf.check(whole, training_args=arguments).findings


def test_arguments_that_give_way_to_sections():
    config = all_auto(FIXED)
    arguments = {"optim": "adamw_torch", "lr_scheduler_type": "linear", "warmup_steps": 1}
    assert not zf.check(config, training_args=arguments).findings
    (one,) = zf.check(config, training_args=arguments | {"optim": "adamw_bnb_8bit"}).findings
    assert (one.path, one.severity) == ("optimizer.type", "warning") and "ignores" in one.why


def test_a_trainer_that_fills_in_no_warmup_steps_is_stopped_by_deepspeed():
    """Before transformers 5.18; later ones make it 1 step."""
    found = zf.check(all_auto(FIXED), training_args={"optim": "adamw_torch", "lr_scheduler_type": "linear"}).findings
    older = TorchVersion(transformers.__version__) < "5.18"
    assert [(one.code, one.path) for one in found] == (
        [("scheduler-warmup", "scheduler.params.warmup_num_steps")] * older
    )


ACCELERATE = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 2
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 1
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 4
"""


def plugin(monkeypatch: pytest.MonkeyPatch, **environment: str) -> dict:
    """Return what Accelerate's plugin makes of what `accelerate launch` hands it."""
    from accelerate.utils import DeepSpeedPlugin

    for name, value in environment.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    made = DeepSpeedPlugin()
    made.set_mixed_precision("bf16")
    return json.loads(json.dumps({k: v for k, v in made.deepspeed_config.items() if k != "steps_per_print"}))


def test_accelerates_own_keys_stand_for_a_json(tmp_path, monkeypatch):
    path = tmp_path / "acc.yaml"
    path.write_text(ACCELERATE)
    ours, _ = plugin_config(read_argument_file(str(path), ACCELERATE, accelerate=True))
    theirs = plugin(
        monkeypatch,
        GRADIENT_ACCUMULATION_STEPS="2",
        GRADIENT_CLIPPING="0.5",
        DEEPSPEED_ZERO_STAGE="1",
        DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="cpu",
    )
    for part in theirs["zero_optimization"].values():
        if isinstance(part, dict):
            part.pop("nvme_path")  # null, which nothing reads
    assert ours == theirs
    text = ACCELERATE.replace("offload_param_device: none", "offload_param_device: cpu")
    path.write_text(text)
    found = zf.check(accelerate_config=path)
    assert (found.file, found.reader.name, found.hardware.ranks) == (str(path), "accelerate", 4)
    assert [(f.code, f.line) for f in found.errors] == [("offload-param-stage", 6)]


@pytest.mark.parametrize("field", ["zero_stage", "mixed_precision", "gradient_clipping"])
def test_accelerate_refuses_its_own_keys_beside_a_json(tmp_path, monkeypatch, field):
    from accelerate.utils import DeepSpeedPlugin

    json_file = tmp_path / "ds.json"
    json_file.write_text(json.dumps(FIXED, indent=1))
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", f"deepspeed_config_file,zero3_init_flag,{field}")
    with pytest.raises(ValueError, match="will be ignored"):
        DeepSpeedPlugin(hf_ds_config=str(json_file))
    lines = {"zero_stage": "  zero_stage: 2", "gradient_clipping": "  gradient_clipping: 0.5"}
    text = f"deepspeed_config:\n  deepspeed_config_file: ds.json\n{lines.get(field, 'mixed_precision: bf16')}\n"
    beside = tmp_path / "acc.yaml"
    beside.write_text(text)
    found = zf.check(accelerate_config=beside)  # the JSON that it names lies beside it
    assert found.file == str(json_file)
    (one,) = [f for f in found.errors if f.code == "accelerate-beside-json"]
    assert one.other_place == f"{beside}:3" and json_file.read_text().splitlines()[one.line - 1].strip().startswith('"')


def test_what_accelerate_puts_in_without_being_told(monkeypatch):
    from accelerate.utils import DeepSpeedPlugin

    monkeypatch.delenv("ACCELERATE_CONFIG_DS_FIELDS", raising=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": "auto",
            "offload_optimizer": {"device": "auto"},
            "stage3_gather_16bit_weights_on_model_save": "auto",
        },
    }
    theirs = DeepSpeedPlugin(hf_ds_config=json.loads(json.dumps(config))).deepspeed_config
    found = zf.check(config, reader="accelerate")
    settled = effective_config(config, catalog(), found.hardware).subject.config
    assert settled == {key: value for key, value in theirs.items() if key != "steps_per_print"}
    assert not found.errors


SCRIPT = r"""#!/bin/bash
export LR=3e-4
GPUS=8; BATCH="4"
ARGS="--bf16 True --weight_decay 0.1"
MORE=(
  --max_grad_norm 0.3   # the paper's
  --adam_beta2=0.95
)
echo "start $(date); --learning_rate 1"
torchrun --nproc_per_node=$GPUS train.py \
    --deepspeed ds.json \
    --per_device_train_batch_size $BATCH \
    --gradient_accumulation_steps ${STEPS:-2} \
    --learning_rate ${LR} \
    --seed $SEED --output-dir "out/$(date +%F)" \
    $ARGS "${MORE[@]}" | tee log.txt
"""


def test_a_script_is_read_as_the_shell_would():
    read = read_argument_file("run.sh", SCRIPT, accelerate=False)
    values = {name: (one.value, one.line) for name, one in read.values.items()}
    assert values == {
        "nproc_per_node": (8, 10),
        "deepspeed": ("ds.json", 11),
        "per_device_train_batch_size": (4, 12),
        "gradient_accumulation_steps": (2, 13),
        "learning_rate": (3e-4, 14),
        "seed": (None, 15),
        "output_dir": (None, 15),
        "bf16": (True, 4),
        "weight_decay": (0.1, 4),
        "max_grad_norm": (0.3, 6),
        "adam_beta2": (0.95, 7),
    }
    assert (read.ranks, read.open, read.config_file) == (8, False, "ds.json")
    assert read_argument_file("run.sh", SCRIPT.replace("| tee", '"$@" | tee'), accelerate=False).open


@pytest.mark.parametrize("end", ["> log", ">>$LOG 2>&1", "2>&1 | tee log", "&> 'a log'", "< /dev/null > log &"])
def test_redirections_are_no_arguments(end):
    read = read_argument_file("run.sh", f"deepspeed train.py --deepspeed 'a>b.json' --bf16 {end}\n", accelerate=False)
    assert {name: one.value for name, one in read.values.items()} == {"deepspeed": "a>b.json", "bf16": True}
    assert not read.open


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            "--deepspeed ds.json>log",
            "--lr 2>log",
            "--lr x2>log b",
            "a>>log b",
            'a<"log" b',
            "a2>&1 b",
            "a>&2 b",
            "a&>log b",
        ),
        *(
            '"a>b" c',
            "a\\>b c",
            "a <<<word b",
            "--x=1>log --y=2",
            "a>'log'b c 2>log",
            "a 12>log b",
            "a >& log b",
            "a#b #c",
        ),
        *('"a \\\nb" c', '"a\\$b" c\\ d', '"a\\d" \\"', "a\\d '\\d'"),
    ],
)
def test_words_and_redirections_are_those_of_bash(tmp_path, arguments):
    (tmp_path / "log").touch()
    script = f'exec 3>&1; show() {{ printf "%s\\n" "$@" >&3; }}; show {arguments}\n'
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    (words,) = commands(f"show {arguments}\n")
    assert [word.text for word in words[1:]] == done.stdout.splitlines()


@pytest.mark.parametrize(
    "script",
    [
        *('A="--x 1"\nA+=" --y 2"\nshow $A', "A=1; A+=0; show $A", 'A=(--x 1)\nA+=(--y "2 3")\nshow "${A[@]}" end'),
        *("declare -x A=4\nshow $A", 'A="\n  --x 1 \\\n  --bf16 \\\n  --y"\nshow $A', "A=(a 'b c')\nshow ${A[@]}"),
    ],
)
def test_variables_are_those_of_bash(script):
    """A backslash at the end of a line in quotes was the value of the flag before it, and += was a word."""
    define = 'exec 3>&1; show() { printf "%s\\n" "$@" >&3; }\n'
    done = subprocess.run(["bash", "-c", define + script], capture_output=True, text=True, check=True)
    *_, words = commands(f"{script}\n")
    assert [word.text for word in words[1:]] == done.stdout.splitlines()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("torchrun --nproc_per_node=8", "torchrun (run.sh:2) gives each rank one thread"),
        ("accelerate launch --num_processes 8", "accelerate (run.sh:2) gives each rank one thread"),
        ("python -m torch.distributed.run --nproc_per_node 2", "torch.distributed.run (run.sh:2) gives each rank"),
        ("/opt/env/bin/torchrun --nproc-per-node gpu", "torchrun (run.sh:2) gives each rank one thread"),
        ("accelerate launch", "accelerate (run.sh:2) gives each rank one thread"),  # as its own file says: all GPUs
        ("torchrun --nproc_per_node=1", None),
        ("torchrun", None),
        ("torchrun --nnodes 2 --nproc_per_node 1", None),
        ("accelerate launch --num_processes 1", None),
        ("OMP_NUM_THREADS=12 torchrun --nproc_per_node=8", None),
        ("deepspeed --num_gpus 8", None),
    ],
)
def test_a_launcher_that_leaves_cpu_adam_one_thread(tmp_path, command, said):
    script = tmp_path / "run.sh"
    script.write_text(f"set -e\n{command} train.py --deepspeed ds.json --bf16 True --output_dir out/accelerate\n")
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config, indent=1))
    found = zf.check(tmp_path / "ds.json", training_args=script).findings
    threads = [one.message for one in found if one.code == "offload-one-thread"]
    assert [said in message.replace(f"{tmp_path}/", "") for message in threads] == ([True] if said else [])


YAML = """\
### model
model_name_or_path: some/model
stage: sft
deepspeed: ds.json
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1e-4   # a word for YAML 1.1
bf16: true
"""
AXOLOTL = """\
base_model: some/model
micro_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 0.0001
bf16: auto
deepspeed: ds.json
"""


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("llama_factory.yaml", YAML, 6),
        ("axolotl.yaml", AXOLOTL, 3),
        (
            "args.json",
            '{\n"per_device_train_batch_size": 1,\n"gradient_accumulation_steps": 8, "learning_rate": 1e-4}',
            3,
        ),
        ("run.sh", "deepspeed t.py --learning_rate 1e-4 \\\n --gradient_accumulation_steps 8", 2),
    ],
)
def test_lines_in_both_files(tmp_path, name, text, line):
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 2},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config, indent=1))
    beside = tmp_path / name
    beside.write_text(text)
    found = zf.check(tmp_path / "ds.json", training_args=beside)
    (one,) = found.findings
    assert (one.code, one.line, one.other_place) == ("flag-differs", 3, f"{beside}:{line}")
    assert one.as_dict()["beside"] == one.other_place
    assert (
        get(effective_config(found.document.config, catalog(), found.hardware).subject.config, "optimizer.params.lr")
        == 1e-4
    )
    rows = {row.path: row.text for row in found.explain()}
    assert rows["optimizer.params.lr"].startswith("0.0001: learning_rate")


def test_what_axolotl_makes_of_its_own_keys():
    """Its `batch_size` is a rank's; `optimizer`, `lr_scheduler` are the Trainer's `optim`, `lr_scheduler_type`."""
    text = "base_model: m\nbatch_size: 8\nmicro_batch_size: 2\noptimizer: adamw_torch_fused\nlr_scheduler: cosine\n"
    asked = {one.path: one for one in requested_by(read_argument_file("a.yaml", text, accelerate=False), None)}
    steps, kind = asked["gradient_accumulation_steps"], asked["optimizer.type"]
    assert (steps.value, steps.source, steps.place) == (4, "batch_size 8 in micro batches of 2", "a.yaml:2")
    assert (kind.source, kind.place) == ("optimizer adamw_torch_fused", "a.yaml:4")
    assert asked["gradient_clipping"].value == 1.0  # the Trainer's own default
    assert "optimizer.params.lr" not in asked and "bf16.enabled" not in asked  # which have none in axolotl


def test_a_trainer_that_accelerate_launches_compares_what_accelerate_has_filled():
    """`mixed_precision` of the YAML fills "auto", and the Trainer, not told of bf16, then stops."""
    config = all_auto(FIXED)
    found = zf.check(config, accelerate_config={"mixed_precision": "bf16"}, training_args={"learning_rate": 1e-4})
    assert "bf16.enabled" in {f.path for f in found.findings if f.code == "flag-differs"}


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2", "", "{", "\t: x"])
def test_what_is_no_such_file(tmp_path, text):
    path = tmp_path / "args.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as raised:
        zf.check(FIXED, training_args=path)
    assert str(path) in raised.value.problems[0].message
    with pytest.raises(UserError):
        zf.check(FIXED, training_args=tmp_path / "none.yaml")
    (tmp_path / "run.sh").write_text("echo nothing\n")
    with pytest.raises(UserError, match="no command"):
        zf.check(FIXED, training_args=tmp_path / "run.sh")
    with pytest.raises(UserError, match="no DeepSpeed JSON"):
        zf.check(training_args={"learning_rate": 1e-4})


def test_ranks_that_files_start():
    def ranks(values: dict) -> int | None:
        return of_mapping(values, accelerate=False).ranks

    assert ranks({"num_gpus": 4, "num_nodes": 2}) == 8
    assert ranks({"num_processes": 16}) == 16
    assert ranks({"nproc_per_node": "gpu"}) is None
    for unknown in ({"nnodes": "1:4"}, {"num_nodes": -1}, {"hostfile": "hosts"}):
        assert ranks({"nproc_per_node": 8, **unknown}) is None
    assert ranks({"num_gpus": 8, "hostfile": "hosts", "num_nodes": 2}) == 16


def test_a_batch_for_nodes_that_only_the_job_knows(tmp_path):
    """It was compared with the batch of one node, which gave two false errors."""
    flags = "--deepspeed ds.json --per_device_train_batch_size 4"
    (tmp_path / "run.sh").write_text(f"torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 train.py {flags}\n")
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
    assert not zf.check(config, training_args=tmp_path / "run.sh").errors


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (
            {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1, "overlap_comm": "auto"}},
            "auto-unfilled",
        ),
        (
            {"train_micro_batch_size_per_gpu": 1, "wall_clock_breakdown": "auto", "zero_optimization": {}},
            "auto-unfilled",
        ),
        ({"train_batch_size": "auto", "zero_optimization": {"stage": 1}}, "batch-auto"),
    ],
)
def test_auto_that_accelerate_does_not_know(monkeypatch, config, code):
    """`deepspeed_config_process` goes over every key with what `Accelerator.prepare` has for it."""
    from accelerate.utils import DeepSpeedPlugin

    monkeypatch.delenv("ACCELERATE_CONFIG_DS_FIELDS", raising=False)
    theirs = DeepSpeedPlugin(hf_ds_config=json.loads(json.dumps(config)))
    has = {} if code == "batch-auto" else {"train_batch_size": 1}
    with pytest.raises(ValueError, match="not found in kwargs"):
        theirs.deepspeed_config_process(must_match=False, gradient_clipping=1.0, **has)
    found = {f.code: f for f in zf.check(config, reader="accelerate").findings}
    assert found[code].severity == "error" and found[code].effect == "stops"


def test_resolve_gives_what_the_trainer_hands_over(monkeypatch):
    config, arguments = all_auto(FIXED), SAME
    plain, _ = trainers(config, arguments, monkeypatch)
    resolved = zf.check(config, Run(ranks=1), training_args=arguments).resolve()
    assert resolved.config == plain
    assert {row["path"] for row in resolved.reasons} >= {"gradient_clipping", "optimizer.params.lr"}
    with pytest.raises(UserError, match="gradient_accumulation_steps"):
        zf.check(config | {"gradient_accumulation_steps": 3}, training_args=arguments).resolve()
    with pytest.raises(UserError, match="no value given for train_batch_size"):
        zf.check(config, training_args=arguments).resolve()


def test_accelerate_without_deepspeed(tmp_path):
    beside = tmp_path / "acc.yaml"
    beside.write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\n")
    found = zf.check(FIXED, accelerate_config=beside).findings
    (one,) = [f for f in found if f.code == "accelerate-beside-json"]
    assert (one.severity, one.other_place) == ("warning", f"{beside}:1")
    with pytest.raises(UserError, match="neither name nor contain one"):
        zf.check(accelerate_config=beside)


def test_a_json_that_is_not_there_is_named_with_its_line(tmp_path):
    beside = tmp_path / "llama_factory.yaml"
    beside.write_text(YAML)
    with pytest.raises(UserError) as raised:
        zf.check(training_args=beside)
    assert raised.value.problems[0].where == f"{beside}:4"


def test_keys_that_accelerate_ignores_are_named(tmp_path):
    path = tmp_path / "accelerate.yaml"
    kept = "  zero_stage: 2\n  zero3_init_flag: false\n  deepspeed_multinode_launcher: standard\n"
    path.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n" + kept)
    assert not zf.check(accelerate_config=path).findings
    path.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n" + kept + "  gradient_acumulation_steps: 2\n")
    (fault,) = zf.check(accelerate_config=path).findings
    assert (fault.code, fault.severity, fault.line) == ("unknown-key", "error", 6)
    assert f"{path}:6" in fault.message and "gradient_accumulation_steps" in fault.fix
