"""Checkpoints of other programs are read by the metadata in their files: names, values, states, damage."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.checkpoint.conftest import RUNS
from zerofit.app.checkpoints import Checkpoint
from zerofit.app.training.train import prepare
from zerofit.checkpoint import safe_load
from zerofit.checkpoint.foreign import foreign_at
from zerofit.checkpoint.foreign_facts import facts_of, verify_foreign
from zerofit.checkpoint.full_state import FullState
from zerofit.spec.errors import UserError
from zerofit.spec.events import Event, Reporter
from zerofit.spec.run import load_run


def plain(runs, name: str, folder: Path) -> tuple[Path, Path]:
    """The files that DeepSpeed's engine wrote in a run, as a plain program leaves them; and the run's checkpoint."""
    own = sorted(runs(name).folder.checkpoints.glob("step-*"))[-1]
    shutil.copytree(own / "state", folder / "saved" / "global_step3")
    (folder / "saved" / "latest").write_text("global_step3")
    for file in folder.glob("saved/*/*.pt"):  # with checksums, which runs leave out
        torch.save(torch.load(file, weights_only=False), file)
    return folder / "saved", own


@pytest.mark.parametrize("run", ["zero2", "zero3-bf16", "images"])
def test_deepspeeds_files_have_the_names_and_values_of_the_runs_own_index(runs, tmp_path, run):
    saved, own = plain(runs, run, tmp_path)
    theirs, ours = FullState(saved), FullState(own)
    assert sorted(theirs.names) == sorted(ours.names) and sorted(theirs.buffers) == sorted(ours.buffers)
    assert theirs.ties == ours.ties and theirs.notes == []
    for name in ours.names:
        assert theirs.shape(name) == ours.shape(name)
        assert set(theirs.kinds(name)) == set(ours.kinds(name)) >= {"fp32", "exp_avg", "exp_avg_sq"}
        for kind in ours.kinds(name):
            assert torch.equal(theirs.read(name, kind), ours.read(name, kind)), (name, kind)
    for counter in ("step", "global_steps", "global_samples"):
        assert theirs.counters[counter] == ours.counters[counter] > 0


def test_shares_of_tensor_parallel_ranks_are_joined(runs, tmp_path):
    saved, own = plain(runs, "tp-tied", tmp_path)
    theirs, ours = FullState(saved), FullState(own)
    assert sorted(theirs.names) == sorted(ours.names) and theirs.ties == ours.ties
    for name in ours.names:
        for kind in ours.kinds(name):
            assert torch.equal(theirs.read(name, kind), ours.read(name, kind)), (name, kind)


def test_shares_of_two_steps_are_noticed(runs, tmp_path):
    saved, _ = plain(runs, "tp-tied", tmp_path)
    assert not Checkpoint(saved).verify().problems
    file = next(saved.glob("*/*mp_rank_01_optim_states.pt"))
    content = torch.load(file, weights_only=False)
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data.add_(1)
    torch.save(content, file)
    assert [Path(problem.file).name for problem in Checkpoint(saved).verify().problems] == [file.name]


def test_shares_without_rules_are_refused(runs, tmp_path):
    saved, _ = plain(runs, "tp-tied", tmp_path)
    for file in saved.glob("*/mp_rank_*_model_states.pt"):
        content = torch.load(file, weights_only=False)
        content.pop("universal_checkpoint_info")
        torch.save(content, file)
    with pytest.raises(UserError, match="2 tensor parallel ranks, without rules to join them"):
        FullState(saved)


def trained_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def distributed(tmp_path) -> Path:
    model, optimizer = trained_model()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    return tmp_path / "dcp"


def test_distributed_checkpoints_of_torch(distributed):
    model, optimizer = trained_model()
    state = FullState(distributed)
    assert state.counters["step"] == 3
    assert sorted(state.names) == sorted(name for name, _ in model.named_parameters())
    assert sorted(state.buffers) == sorted(name for name, _ in model.named_buffers())
    for name, parameter in model.named_parameters():
        assert torch.equal(state.read(name), parameter)
        assert torch.equal(state.read(name, "exp_avg_sq"), optimizer.state[parameter]["exp_avg_sq"])


def test_damage_of_accelerates_separate_optimizer_is_named(tmp_path):
    weights, states = get_state_dict(*trained_model())
    dcp.save({"model": weights}, checkpoint_id=str(tmp_path / "pytorch_model_fsdp_0"), no_dist=True)
    dcp.save({"optimizer": states}, checkpoint_id=str(tmp_path / "optimizer_0"), no_dist=True)
    assert Checkpoint(tmp_path).verify().problems == []
    file = tmp_path / "optimizer_0/__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1000])
    assert {problem.file for problem in Checkpoint(tmp_path).verify().problems} == {"optimizer_0/__0_0.distcp"}


def test_torchtitan_saves_the_settings_of_each_parameter(tmp_path):
    model, optimizer = trained_model()
    names = [name for name, _ in model.named_parameters()]
    states = {
        f"state.{name}.{kind}": value
        for number, name in enumerate(names)
        for kind, value in optimizer.state_dict()["state"][number].items()
    }
    settings = {f"param_groups.{name}.lr": 0.1 if "weight" in name else 0.2 for name in names}
    dcp.save(
        {**model.state_dict(), "optimizer": states | settings}, checkpoint_id=str(tmp_path / "step-3"), no_dist=True
    )
    state = FullState(tmp_path / "step-3")
    assert {tuple(group.names): group.settings for group in state.groups} == {
        tuple(name for name in names if "weight" in name): {"lr": 0.1},
        tuple(name for name in names if "weight" not in name): {"lr": 0.2},
    }
    assert torch.equal(state.read("0.weight", "exp_avg"), optimizer.state[model[0].weight]["exp_avg"])


def test_state_dicts_in_a_file(tmp_path):
    model, optimizer = trained_model()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    state = FullState(tmp_path / "state.pt")
    assert torch.equal(state.read("2.weight"), model[2].weight)
    assert torch.equal(state.read("1.running_mean"), model[1].running_mean)
    assert torch.equal(state.read("2.weight", "exp_avg"), optimizer.state[model[2].weight]["exp_avg"])
    assert state.notes == [] and state.counters["step"] == 3


def save_numbered(folder: Path, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Train a step, and save as Accelerate does: safetensors, and an optimizer whose states have numbers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    optimizer.step()
    folder.mkdir()
    save_file({name: parameter.detach() for name, parameter in model.named_parameters()}, folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    return optimizer


def test_numbered_states_of_safetensors_need_the_models_order(tmp_path):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
    config = transformers.LlamaConfig(hidden_size=8, intermediate_size=8, **sizes)
    model = transformers.LlamaForCausalLM(config)
    optimizer = save_numbered(tmp_path / "saved", model)
    checkpoint = Checkpoint(tmp_path / "saved")
    with pytest.raises(UserError, match="--model FOLDER"):
        checkpoint.convert(tmp_path / "out", to="dcp")
    config.save_pretrained(tmp_path / "config")
    checkpoint.convert(tmp_path / "out", to="dcp", model=tmp_path / "config")
    state = FullState(tmp_path / "out")
    for name, parameter in model.named_parameters():
        assert torch.equal(state.read(name, "exp_avg"), optimizer.state[parameter]["exp_avg"]), name
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    assert not checkpoint.verify().problems
    with pytest.raises(UserError, match="unknown"):
        checkpoint.convert(tmp_path / "out2", to="universal", model=tmp_path)
    config.save_pretrained(tmp_path)  # the parent's config.json
    checkpoint.convert(tmp_path / "out2", to="universal")


def test_a_tied_weight_of_safetensors_has_both_names_for_deepspeed(tmp_path):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16, "tie_word_embeddings": True}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=8, intermediate_size=8, **sizes))
    save_numbered(tmp_path / "saved", model)  # named_parameters has a tied weight once, as save_pretrained writes it
    model.config.save_pretrained(tmp_path / "saved")
    Checkpoint(tmp_path / "saved").convert(tmp_path / "out", to="deepspeed", ranks=1, stage=1)
    (file,) = (tmp_path / "out").rglob("mp_rank_00_model_states.pt")
    module = torch.load(file, weights_only=False)["module"]
    assert torch.equal(module["lm_head.weight"], model.lm_head.weight)
    transformers.LlamaForCausalLM(model.config).load_state_dict(module)  # strict, as DeepSpeed loads it


def test_equal_shapes_are_not_matched_by_the_order_of_safetensors(tmp_path):
    save_numbered(tmp_path / "saved", torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(11))))
    assert "cannot be matched" in FullState(tmp_path / "saved").notes[0]  # sorted, 10.weight comes before 2.weight


def test_no_pickle_runs(distributed, tmp_path):
    for value in (Touch(tmp_path / "ran"), {"storage_data": Touch(tmp_path / "ran")}):
        (distributed / ".metadata").write_bytes(pickle.dumps(value))
        with pytest.raises(UserError, match="could run code"):
            FullState(distributed)
    (distributed / ".metadata").write_bytes(b"\x80\x04]r\xfe\xff\xff\xff.")  # a memo with four billion places
    with pytest.raises(UserError, match="needs far more memory"):
        FullState(distributed)
    torch.save({"model": Touch(tmp_path / "ran")}, tmp_path / "state.pt")
    with pytest.raises(UserError, match="could run code"):
        FullState(tmp_path / "state.pt")
    assert not (tmp_path / "ran").exists()
    with safe_load.trusted_pickles(True):
        safe_load.load(tmp_path / "state.pt")
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(("key", "value"), [("ds_config", 5), ("dp_world_size", "x"), ("param_shapes", [None])])
def test_unexpected_content_is_damage(runs, tmp_path, key, value):
    saved, _ = plain(runs, "zero2", tmp_path)
    file = next(saved.glob("*/mp_rank_00_model_states.pt"))
    torch.save(torch.load(file, weights_only=False) | {key: value}, file)
    found = foreign_at(saved)
    assert found
    (damage,) = [*facts_of(found).damage, *verify_foreign(found)][:1]
    assert damage.kind == "incomplete" and "unexpected content" in damage.message


class Touch:
    """A pickle that creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def lose_rank(saved: Path) -> None:
    next(saved.glob("*/*pp_rank_1_*optim_states.pt")).unlink()


def truncate(saved: Path) -> None:
    file = next(saved.glob("*/*pp_rank_1_*optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-300])


def flip(saved: Path) -> None:
    file = next(saved.glob("*/*pp_rank_1_*optim_states.pt"))
    content = bytearray(file.read_bytes())
    place = content.index(b"/data/0FB")  # the record's header; its data come within 64 bytes
    content[place + 200] ^= 16
    file.write_bytes(content)


def other_step(saved: Path) -> None:
    file = next(saved.glob("*/*pp_rank_1_*optim_states.pt"))
    content = torch.load(file, weights_only=False)
    saved_state = content["optimizer_state_dict"]
    for state in (saved_state.get("base_optimizer_state") or saved_state["optimizer_state_dict"])["state"].values():
        state["step"] += 1
    torch.save(content, file)


def text(saved: Path) -> None:
    next(saved.glob("*/*pp_rank_1_*optim_states.pt")).write_text("<html>404</html>")


def shorter(saved: Path) -> None:
    for model in saved.glob("*/*mp_rank_00_model_states.pt"):
        content = torch.load(model, weights_only=False)
        content["ds_config"]["zero_optimization"]["round_robin_gradients"] = True
        torch.save(content, model)
    file = next(saved.glob("*/*pp_rank_1_*optim_states.pt"))
    content = torch.load(file, weights_only=False)
    for key in {"single_partition_of_fp32_groups", "fp32_flat_groups"} & content["optimizer_state_dict"].keys():
        content["optimizer_state_dict"][key] = [flat[:-2].clone() for flat in content["optimizer_state_dict"][key]]
    torch.save(content, file)


def half_written(saved: Path) -> None:
    (saved / "global_step4").mkdir()
    (saved / "latest").write_text("global_step4")


DAMAGE = {
    text: "unreadable",
    lose_rank: "missing",
    truncate: "truncated",
    flip: "changed",
    other_step: "mixed",
    shorter: "incomplete",
    half_written: "misplaced",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("run", ["zero2", "zero3-bf16"])
def test_damage_is_named(runs, tmp_path, run, damage):
    saved, _ = plain(runs, run, tmp_path)
    assert Checkpoint(saved).verify().problems == []
    damage(saved)
    problems = Checkpoint(saved).verify().problems
    assert {problem.kind for problem in problems} == {DAMAGE[damage]}
    where = "latest" if damage is half_written else "pp_rank_1_mp_rank_00_optim_states.pt"
    assert any(where in problem.file for problem in problems)


def test_states_may_have_padding(runs, tmp_path):
    saved, _ = plain(runs, "zero2", tmp_path)
    file = next(saved.glob("*/*pp_rank_1_*optim_states.pt"))
    content = torch.load(file, weights_only=False)
    optimizer = content["optimizer_state_dict"]
    optimizer["group_paddings"] = [4 for _ in optimizer["single_partition_of_fp32_groups"]]
    for state in optimizer["base_optimizer_state"]["state"].values():
        state["exp_avg"] = torch.cat([state["exp_avg"], torch.zeros(4)])
    torch.save(content, file)
    assert Checkpoint(saved).verify().problems == []


def test_a_rank_of_another_run_has_other_weights(runs, tmp_path):
    saved, _ = plain(runs, "zero2", tmp_path)
    file = next(saved.glob("*/*pp_rank_1_*optim_states.pt"))
    content = torch.load(file, weights_only=False)
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data.add_(1)
    torch.save(content, file)
    (problem,) = Checkpoint(saved).verify().problems
    assert problem.kind == "mixed" and "master weights of " in problem.message


def test_what_it_is(runs, tmp_path):
    saved, _ = plain(runs, "zero3-bf16", tmp_path)
    assert Checkpoint(saved).describe().name == "a checkpoint by DeepSpeed: ZeRO-3, 2 ranks, step 3"
    (row,) = Checkpoint.list(saved).checkpoints
    assert (row.step, row.world_size, row.layout.zero_stage, row.problems) == (3, 2, 3, [])


def test_export_is_what_the_run_exported(runs, tmp_path):
    """Names, ties and the type come from the files and config.json, and not from the run."""
    saved, own = plain(runs, "zero3-bf16", tmp_path)
    Checkpoint(own).export(tmp_path / "ours")
    shutil.copyfile(tmp_path / "ours/config.json", saved / "config.json")
    result = Checkpoint(saved).export(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / side / "model.safetensors") for side in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and result.dtype == "bf16"
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")


def test_export_without_a_config_keeps_the_names(distributed, tmp_path):
    Checkpoint(distributed).export(tmp_path / "out")
    model, _ = trained_model()
    model.load_state_dict(load_file(tmp_path / "out/model.safetensors"))


def as_lightning(own: Path, folder: Path) -> Path:
    """A run's checkpoint as Lightning's strategy saves a module that has the model as its attribute `net`."""
    saved = folder / "saved/epoch=0-step=2.ckpt"
    shutil.copytree(own / "state", saved / "checkpoint")
    (saved / "latest").write_text("checkpoint")
    for file in saved.glob("*/*_model_states.pt"):
        content = torch.load(file, weights_only=False)
        content["module"] = {f"net.{name}": tensor for name, tensor in content["module"].items()}
        content["param_shapes"] = [
            {f"net.{n}": shape for n, shape in group.items()} for group in content["param_shapes"]
        ]
        torch.save(content, file)
    return folder / "saved"


def as_torchtitan(own: Path, folder: Path) -> Path:
    """A run's checkpoint as torchtitan's manager saves it with PyTorch DCP."""
    state = FullState(own)
    states = {
        f"state.{name}.{kind}": state.read(name, kind) for name in state.names for kind in ("exp_avg", "exp_avg_sq")
    }
    states |= {f"state.{name}.step": torch.tensor(2.0) for name in state.names}
    states |= {f"param_groups.{name}.lr": 1e-2 for name in state.names}
    states |= {f"param_groups.{name}.betas": (0.9, 0.95) for name in state.names}
    weights = {name: state.read(name) for name in state.tensors}
    dcp.save({**weights, "optimizer": states}, checkpoint_id=str(folder / "saved/step-2"), no_dist=True)
    return folder / "saved/step-2"


def as_accelerate(own: Path, folder: Path) -> Path:
    """A run's checkpoint as Accelerate saves it without sharding: sorted weights, numbered states, no config."""
    state, saved = FullState(own), folder / "saved"
    saved.mkdir()
    save_file({name: state.read(name) for name in sorted(state.names)}, saved / "model.safetensors")
    torch.save(numbered_states(state), saved / "optimizer.bin")
    (saved / "random_states_0.pkl").touch()
    return saved


def as_lightning_without_sharding(own: Path, folder: Path) -> Path:
    """A run's checkpoint as Lightning saves it with DDP: the names have a prefix, but are in the model's order."""
    state = FullState(own)
    weights = {f"net.{name}": state.read(name) for name in state.names}
    content = {"state_dict": weights, "optimizer_states": [numbered_states(state)], "global_step": 2}
    torch.save(content, folder / "epoch=0-step=2.ckpt")
    return folder / "epoch=0-step=2.ckpt"


def numbered_states(state: FullState) -> dict:
    """What torch's AdamW saves: states numbered in the order of the model's parameters."""
    numbered = {
        number: {"step": torch.tensor(2.0)} | {kind: state.read(name, kind) for kind in ("exp_avg", "exp_avg_sq")}
        for number, name in enumerate(state.names)
    }
    return {"state": numbered, "param_groups": [{"lr": 1e-2, "params": [*numbered]}]}


@pytest.mark.parametrize("written", [as_lightning, as_torchtitan, as_accelerate, as_lightning_without_sharding])
def test_a_run_resumes_from_another_program_in_another_layout(runs, pools, tmp_path, written):
    """The next loss is that of the run that wrote the files; so is the next step, which the states decide."""
    own, done = (runs("zero3-bf16").folder.checkpoints / f"step-{step:08}" for step in (2, 3))
    how = {**RUNS["zero3-bf16"], "data": runs("zero3-bf16").job.run.data, "ds_config": "zero1"}
    resumed = pools(2).train(tmp_path / "run", **how, resume=str(written(own, tmp_path)))
    assert [row["step"] for row in resumed.steps] == [3]
    assert resumed.losses[0] == pytest.approx(runs("zero3-bf16").losses[2], rel=1e-4)
    before, after = FullState(own), FullState(done)
    ours = FullState(resumed.folder.checkpoints / done.name)
    for name in before.names:
        step = after.read(name) - before.read(name)
        assert (ours.read(name) - after.read(name)).norm() < 0.1 * step.norm(), name


def test_a_resume_names_the_settings_of_the_optimizer_that_change(runs, tmp_path):
    """A run keeps its own settings. The files of torchtitan have other betas, and no weight decay to compare."""
    saved = as_torchtitan(runs("zero3-bf16").folder.checkpoints / "step-00000002", tmp_path)
    run = {**RUNS["zero3-bf16"], "data": runs("zero3-bf16").job.run.data, "ds_config": "zero1", "ranks": 2}
    events = list[Event]()
    prepare(load_run(None, {**run, "output": tmp_path / "run", "resume": str(saved)}), Reporter(events.append))
    changed = [event.text for event in events if event.text.startswith("the optimizer's")]
    assert changed == ["the optimizer's betas is now [0.9, 0.999] (was [0.9, 0.95])"]
    with pytest.raises(UserError, match="is at step 2, which leaves nothing to train with --steps 2"):
        prepare(load_run(None, {**run, "steps": 2, "output": tmp_path / "done", "resume": str(saved)}), Reporter())


def test_the_scale_of_fp16_losses_survives_everything(runs, pools, tmp_path, monkeypatch):
    """It doubles at each step here. The next loss and scale are those of the run, in another layout too."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True)  # as the ranks of a pool do
    fp16 = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 1, "hysteresis": 3}
    data = runs("zero2").job.run.data

    def train(folder: str, stage: int, resume: str) -> list[dict]:
        config = {"zero_optimization": {"stage": stage}, "fp16": fp16}
        how = {**RUNS["zero2"], "ds_config": config, "precision": "fp16", "data": data, "resume": resume}
        return pools(2).train(tmp_path / folder, **how).steps

    for stage, other in ((2, 3), (0, 1)):
        kept = train(f"kept{stage}", stage, "auto")
        own, saved = tmp_path / f"kept{stage}/checkpoints/step-00000002", tmp_path / f"saved{stage}"
        shutil.copytree(own / "state", saved / "global_step2")
        (saved / "latest").write_text("global_step2")
        numbers = FullState(own).counters["loss_scaler"]
        assert numbers["cur_scale"] > 64 and FullState(saved).counters["loss_scaler"].items() <= numbers.items()
        (step,) = train(f"resumed{other}", other, str(saved))
        assert step["loss_scale"] == kept[2]["loss_scale"] > numbers["cur_scale"]
        assert step["loss"] == pytest.approx(kept[2]["loss"], rel=1e-5)
        for source, to in ((own, "universal"), (saved, "universal"), (own, "deepspeed"), (saved, "deepspeed")):
            for target in range(4) if to == "deepspeed" else (None,):
                out = tmp_path / f"{source.name}-{other}-{to}-{target}"
                Checkpoint(source).convert(out, to=to, ranks=2 if to == "deepspeed" else None, stage=target)
                assert FullState(out).counters["loss_scaler"].items() >= {"cur_scale": numbers["cur_scale"]}.items()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_itself_reads_what_is_written_for_it(runs, tmp_path, stage):
    """On three ranks, with its own script; the states are those of the run."""
    saved, own = plain(runs, "zero2", tmp_path)
    for source, out in ((saved, tmp_path / "a"), (own, tmp_path / "b")):
        result = Checkpoint(source).convert(out, to="deepspeed", ranks=3, stage=stage)
        assert result.tag == "global_step3" and Checkpoint(out).verify().ok
        weights = get_fp32_state_dict_from_zero_checkpoint(str(out))
        ours, theirs = FullState(own), FullState(out)
        for name in ours.names:
            assert torch.equal(weights[name], ours.read(name))
            for kind in ours.kinds(name):
                assert torch.equal(theirs.read(name, kind), ours.read(name, kind))
        assert [len(group.names) for group in theirs.groups] == [len(group.names) for group in FullState(saved).groups]
        # an engine takes this limit for its own (`_load_global_state`), and the source has none
        partition = safe_load.load(next(out.rglob("*zero_pp_rank_0_*optim_states.pt")))["optimizer_state_dict"]
        assert "clip_grad" not in partition


def test_fsdp_itself_reads_what_is_written_for_it(tmp_path):
    model, optimizer = trained_model()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    Checkpoint(tmp_path / "state.pt").convert(tmp_path / "out", to="dcp")
    fresh, moments = trained_model()
    torch.nn.init.zeros_(fresh[0].weight)
    weights, states = get_state_dict(fresh, moments)
    states["state"]["0.weight"]["exp_avg"].zero_()
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert torch.equal(weights["0.weight"], model[0].weight)
    assert torch.equal(states["state"]["0.weight"]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_frozen_weights_are_written_for_stage_three(tmp_path):
    """DeepSpeed's own script reads the result."""
    model, optimizer = trained_model()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    Checkpoint(tmp_path / "state.pt").convert(tmp_path / "2", to="deepspeed", ranks=1, stage=2)
    (file,) = tmp_path.glob("2/*/mp_rank_00_model_states.pt")
    content = torch.load(file, weights_only=False)
    content["module"]["frozen.weight"] = torch.arange(15.0).view(3, 5)
    torch.save(content, file)
    Checkpoint(tmp_path / "2").convert(tmp_path / "3", to="deepspeed", ranks=2, stage=3)
    merged = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "3"))
    assert torch.equal(merged["frozen.weight"], content["module"]["frozen.weight"])
    assert all(torch.equal(merged[name], parameter) for name, parameter in model.named_parameters())
    assert Checkpoint(tmp_path / "2").diff(tmp_path / "3", states=True).equal


@pytest.mark.parametrize("how", [{"to": "dcp"}, {"to": "deepspeed", "ranks": 2, "stage": 1}], ids=lambda how: how["to"])
def test_states_are_written_if_the_first_weight_is_frozen(tmp_path, how):
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(list(model[1].named_parameters(prefix="1")))
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    Checkpoint(tmp_path / "state.pt").convert(tmp_path / "out", **how)
    state = FullState(tmp_path / "out")
    assert torch.equal(state.read("1.weight", "exp_avg"), optimizer.state[model[1].weight]["exp_avg"])
    assert torch.equal(state.read("0.weight"), model[0].weight)


@pytest.mark.parametrize("stage", [0, 2, 3, None])
def test_groups_and_their_settings_are_those_of_the_source(tmp_path, stage):
    """Before, the engine that loaded the result continued with another learning rate and weight decay."""
    model, _ = trained_model()
    parts = [{"params": [model[2].weight, model[2].bias], "lr": 0.3}, {"params": [*model[:2].parameters()]}]
    optimizer = torch.optim.AdamW(parts, lr=0.01, betas=(0.8, 0.88), weight_decay=0.5)
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    named = {p: n for n, p in model.named_parameters()}
    saved = optimizer.state_dict()
    for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        group["param_names"] = [named[p] for p in own["params"]]
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "state.pt")
    how = {"to": "universal"} if stage is None else {"to": "deepspeed", "ranks": 2, "stage": stage}
    events = []
    Checkpoint(tmp_path / "state.pt").convert(tmp_path / "out", **how, on_event=events.append)
    assert any("gives all groups the lr of the first" in str(event) for event in events) == (stage is None)
    if stage is None:
        (file,) = (tmp_path / "out").glob("*/zero/optimizer_state.pt")
        groups = torch.load(file, weights_only=False)["optimizer_state_dict"]["param_groups"]
    elif stage == 0:
        (file,) = (tmp_path / "out").glob("*/mp_rank_00_model_states.pt")
        groups = torch.load(file, weights_only=False)["optimizer"]["param_groups"]
        assert [len(group["params"]) for group in groups] == [2, 4]
    else:
        found = FullState(tmp_path / "out").groups
        assert [group.names for group in found] == [["2.weight", "2.bias"], [*list(named.values())[:4]]]
        groups = [group.settings for group in found]
    if stage is None:  # the result has names, too
        Checkpoint(tmp_path / "out").convert(tmp_path / "again", to="deepspeed", ranks=2, stage=2)
        found = FullState(tmp_path / "again").groups
        assert [group.names for group in found] == [["2.weight", "2.bias"], [*list(named.values())[:4]]]
        groups = [group.settings for group in found]
    assert [group["lr"] for group in groups] == [0.3, 0.01]
    assert all((group["betas"], group["weight_decay"]) == ((0.8, 0.88), 0.5) for group in groups)


def test_what_load_universal_does_not_load_is_said(tmp_path):
    """DeepSpeed's engine loads only what the optimizer has: no buffers, no frozen weights."""
    model, _ = trained_model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    texts = list[str]()
    Checkpoint(tmp_path / "state.pt").convert(tmp_path / "out", on_event=lambda event: texts.append(event.text))
    (said,) = [text for text in texts if "load_universal does not load" in text]
    assert "3 buffers (1.running_mean, ...) and 2 frozen weights (0.weight, ...)" in said


def test_deepspeed_needs_ranks_and_stage(tmp_path):
    with pytest.raises(UserError, match="--ranks"):
        Checkpoint(tmp_path).convert(tmp_path / "out", to="deepspeed")
    with pytest.raises(UserError) as caught:
        Checkpoint(tmp_path).convert(tmp_path / "out", to="dcp", ranks=2, stage=1, dtype="bf16")
    assert [problem.where for problem in caught.value.problems] == ["--ranks", "--stage", "--dtype"]


def test_an_interrupted_conversion_continues(runs, tmp_path):
    saved, own = plain(runs, "zero2", tmp_path)
    options, seen, texts = {"to": "deepspeed", "ranks": 2, "stage": 3}, {}, []

    def interrupt(event) -> None:
        texts.append(event.text)
        for file in tmp_path.glob(".out.writing/*/*rank_0*optim_states.pt"):
            seen[file.name] = file.stat().st_mtime_ns
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Checkpoint(saved).convert(tmp_path / "out", **options, on_event=interrupt)
    assert any(text.startswith("forecast: ") and "host memory" in text for text in texts)
    assert seen and not (tmp_path / "out").exists()
    Checkpoint(saved).convert(tmp_path / "out", **options)
    assert seen == {name: (tmp_path / "out" / "global_step3" / name).stat().st_mtime_ns for name in seen}
    assert not list(tmp_path.rglob(".*"))
    ours, theirs = FullState(own), FullState(tmp_path / "out")
    for name in ours.names:
        assert torch.equal(theirs.read(name, "exp_avg"), ours.read(name, "exp_avg"))


def test_repair_takes_the_weights_of_the_model_states(runs, tmp_path):
    """A lost rank's master weights become those of the model states, and its optimizer states zero."""
    saved, own = plain(runs, "zero2", tmp_path)
    lose_rank(saved)
    with pytest.raises(UserError, match="pp_rank_1_mp_rank_00_optim_states\\.pt is missing"):
        Checkpoint(saved).convert(tmp_path / "out", to="deepspeed", ranks=2, stage=2)
    Checkpoint(saved).convert(tmp_path / "out", to="deepspeed", ranks=2, stage=2, repair=True)
    ours, theirs = FullState(own), FullState(tmp_path / "out")
    for name in ours.names:  # the run is in float32: its model states are the master weights
        assert torch.equal(theirs.read(name), ours.read(name))
    lost = [name for name in ours.names if not theirs.read(name, "exp_avg").any()]
    kept = [name for name in ours.names if torch.equal(theirs.read(name, "exp_avg"), ours.read(name, "exp_avg"))]
    assert lost and kept and len(lost) + len(kept) >= len(ours.names) - 2  # a partition ends within at most 2


def test_a_lost_rank_of_stage_three_cannot_be_repaired(runs, tmp_path):
    saved, _ = plain(runs, "zero3-bf16", tmp_path)
    lose_rank(saved)
    with pytest.raises(UserError, match="no other file contains the weights of"):
        Checkpoint(saved).export(tmp_path / "out", repair=True)


def test_a_lost_rank_of_stage_three_has_the_weights_that_the_program_gathered(runs, tmp_path):
    saved, own = plain(runs, "zero3-bf16", tmp_path)
    ours = FullState(own)
    gathered = {name: ours.read(name).bfloat16() for name in ours.names}
    torch.save(gathered, saved / "pytorch_model.bin")  # as the Trainer does with stage3_gather_16bit_weights
    lose_rank(saved)
    assert "pytorch_model.bin has all weights" in Checkpoint(saved).verify().problems[0].message
    notes = []
    Checkpoint(saved).export(
        tmp_path / "out", repair=True, on_event=lambda e: notes.append(e.text) if e.kind == "note" else None
    )
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert "optimizer states are zero" in notes[0] and sorted(written) == sorted(gathered)
    assert all(torch.equal(written[name], gathered[name]) for name in gathered)
    state = FullState(saved, repair=True)
    assert all(state.read(name, "exp_avg").any() and not state.read(name, "exp_avg").all() for name in ours.names[:1])


def test_a_mixture_of_experts_of_an_older_release(tmp_path):
    """DeepSpeed 0.16 saves no shapes of it; each of two ranks has half of the shared weight, and its own expert."""
    shared, expert = torch.arange(6.0).view(2, 3), "moe.deepspeed_moe.experts.deepspeed_experts"
    experts = [torch.full((2, 2), 7.0), torch.full((2, 2), 9.0)]
    folder = tmp_path / "saved/global_step3"
    folder.mkdir(parents=True)
    model = {"module": {"first.weight": shared}, "global_steps": 3, "dp_world_size": 2, "num_experts": [2]}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank, own in enumerate(experts):
        name = f"layer_0_expert_{rank}_mp_rank_00_model_states.pt"
        torch.save({f"{expert}.{rank}.weight": own.bfloat16()}, folder / name)
        flats = [shared.flatten()[3 * rank :][:3].clone(), own.flatten()]
        optimizer = {
            "base_optimizer_state": {
                "state": {n: {"step": 3, "exp_avg": flat + 1} for n, flat in enumerate(flats)},
                "param_groups": [{"lr": 0.1, "params": [n]} for n in range(2)],
            },
            "single_partition_of_fp32_groups": flats,
            "partition_count": [2, 1],
            "param_slice_mappings": [
                {"first.weight": fragment_address(numel=3, start=0)},
                {f"{expert}.0.weight": fragment_address(numel=4, start=0)},
            ],
        }
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    state = FullState(tmp_path / "saved")
    weights = {"first.weight": shared, f"{expert}.0.weight": experts[0], f"{expert}.1.weight": experts[1]}
    for name, tensor in weights.items():
        assert torch.equal(state.read(name), tensor) and torch.equal(state.read(name, "exp_avg"), tensor + 1)


def test_experts_that_deepspeed_does_not_list(tmp_path):
    """DeepSpeed 0.14 lists half of the experts of two ranks, each of which has two experts in one partition."""
    shared, expert = torch.arange(6.0).view(2, 3), "moe.deepspeed_moe.experts.deepspeed_experts"
    experts = [torch.full((2, 2), 7.0 + number) for number in range(4)]
    folder = tmp_path / "saved/global_step3"
    folder.mkdir(parents=True)
    model = {"module": {"first.weight": shared}, "global_steps": 3, "dp_world_size": 2, "num_experts": [4]}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for number, weight in enumerate(experts):
        name = f"layer_0_expert_{number}_mp_rank_00_model_states.pt"
        torch.save({f"{expert}.{number}.weight": weight}, folder / name)
    for rank in range(2):
        flats = [shared.flatten()[3 * rank :][:3].clone(), torch.cat(experts[2 * rank :][:2]).flatten()]
        optimizer = {
            "base_optimizer_state": {
                "state": {n: {"step": 3, "exp_avg": flat + 1} for n, flat in enumerate(flats)},
                "param_groups": [{"lr": 0.1, "params": [n]} for n in range(2)],
            },
            "single_partition_of_fp32_groups": flats,
            "partition_count": [2, 1],
            "param_slice_mappings": [
                {"first.weight": fragment_address(numel=3, start=0)},
                {f"{expert}.0.weight": fragment_address(numel=4, start=0)},
            ],
        }
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        torch.save({"optimizer": None}, folder / f"expp_rank_{rank}_mp_rank_00_optim_states.pt")
    state = FullState(tmp_path / "saved")
    assert torch.equal(state.read("first.weight"), shared)
    for number, weight in enumerate(experts):
        name = f"{expert}.{number}.weight"
        assert torch.equal(state.read(name), weight) and torch.equal(state.read(name, "exp_avg"), weight + 1)
    (folder / "layer_0_expert_3_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(UserError, match="do not have the experts of the optimizer's files"):
        FullState(tmp_path / "saved")


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("layers", [False, True])  # a pipeline's weights, one file for each layer
def test_flat_groups_of_fp16_without_zero(tmp_path, split, layers):
    """With FusedAdam, DeepSpeed saves each group as one flat tensor (runtime/fp16/fused_optimizer.py)."""
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 2)).half()
    named = dict(model.named_parameters())
    groups = [[n for n, p in named.items() if p.dim() > 1], [n for n, p in named.items() if p.dim() == 1]]
    groups = groups if split else [list(named)]
    optimizer = FP16_Optimizer(torch.optim.AdamW([{"params": [named[n] for n in group]} for group in groups]))
    for flat in optimizer.fp32_groups_flat:
        flat.grad = torch.randn_like(flat)
    optimizer.optimizer.step()
    state = {"module": None if layers else model.state_dict(), "optimizer": optimizer.state_dict(), "buffer_names": []}
    (tmp_path / "global_step1").mkdir()
    torch.save(state | {"global_steps": 1}, tmp_path / "global_step1/mp_rank_00_model_states.pt")
    for number, layer in enumerate(model) if layers else ():
        torch.save(layer.state_dict(), tmp_path / f"global_step1/layer_{number:02}-model_states.pt")
    read = FullState(tmp_path)
    assert not read.notes and [group.names for group in read.groups] == groups
    for group, flat in zip(groups, optimizer.fp32_groups_flat, strict=True):
        for kind, values in {"fp32": flat, **optimizer.optimizer.state[flat]}.items():
            if kind != "step":
                assert torch.equal(torch.cat([read.read(name, kind).view(-1) for name in group]), values.detach())
