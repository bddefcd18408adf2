"""Exported models against the training engines' own evaluation, transformers' own files and plain torchvision."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torchvision
import transformers
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import load_file
from torch.nn import functional

from tests.checkpoint.conftest import GROUPED, SHAPE
from tests.checkpoint.made import Made, make
from zerofit.checkpoint.export import export
from zerofit.checkpoint.model_folder import read_model_info
from zerofit.checkpoint.store import locate
from zerofit.data.loader import eval_batches
from zerofit.data.opening import open_data
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import ImageInputs, TextInputs
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run

TEXT = TextInputs(vocab_size=260, seq_len=16)
IMAGES = ImageInputs(channels=1, size=32, classes=7)
EXPERTS = {**GROUPED, "num_local_experts": 4}


def eval_loss(model, trained):
    """Mean cross entropy over the validation samples that the run's evaluations look at."""
    run = trained.job.run
    data = open_data(run, trained.job.facts.task, run.seq_len, Reporter())
    total, targets = 0.0, 0
    with torch.no_grad():
        for batch in eval_batches(data.valid, 0, 1, 4, run.eval_samples):
            out = model(batch["inputs"].to(next(model.parameters()).dtype) if run.image_size else batch["inputs"])
            logits = getattr(out, "logits", out).float().flatten(0, -2)
            labels = batch["labels"].reshape(-1)
            total += functional.cross_entropy(logits, labels, reduction="sum").item()
            targets += int((labels != -100).sum())
    return total / targets


def exported(trained, folder, **options):
    return export(locate(trained.folder.path), folder, **options)


@pytest.mark.parametrize("name", ["zero2", "zero3-bf16", "tp-tied", "pp-tied"])
def test_transformers_loads_what_was_trained(runs, name, tmp_path):
    trained = runs(name)
    done = exported(trained, tmp_path / "out", max_shard_bytes=50_000)
    assert "model.safetensors.index.json" in done.files and done.parameters == trained.job.facts.parameters
    model, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(found.values()), found
    saved = transformers.AutoModelForCausalLM.from_pretrained(trained.folder.model)
    theirs = saved.state_dict()
    assert all(torch.equal(t, theirs[n]) and t.dtype == theirs[n].dtype for n, t in model.state_dict().items())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == name.endswith("-tied")
    tolerance = 1e-5 if trained.job.run.precision == "fp32" else 2e-3
    assert eval_loss(model, trained) == pytest.approx(trained.result["eval"]["loss"], abs=tolerance)


def test_images_with_batch_norm(runs, tmp_path):
    trained = runs("images")
    done = exported(trained, tmp_path / "out")
    assert done.files == ["model.safetensors", "zerofit.json"]
    about = read_model_info(tmp_path / "out")
    assert (about.model, about.step, about.dtype) == ("resnet18-small", 2, "float32")
    model = build(find(about.model), about.inputs, about.model_args).eval()
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert eval_loss(model, trained) == pytest.approx(trained.result["eval"]["loss"], abs=1e-5)


def test_accelerate_dispatches_it(runs, tmp_path):
    trained = runs("tp-tied")
    exported(trained, tmp_path / "out", max_shard_bytes=50_000)
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path / "out"))
    model.tie_weights()
    model = load_checkpoint_and_dispatch(model, tmp_path / "out", device_map={"": "cpu"}).eval()
    assert eval_loss(model, trained) == pytest.approx(trained.result["eval"]["loss"], abs=1e-5)


def made(tmp_path, name, args, inputs, **run):
    """A checkpoint without training, and the model that is in it."""
    torch.manual_seed(1)
    source = find(name)
    model = build(source, inputs, args)
    state = model.state_dict()
    spec = Run(model=name, model_args=args, data="synthetic", **run)
    what = Made(model=model, run=spec, task=source.task, inputs=inputs)
    folder = make(tmp_path / "run", what, lambda name, kind, _: state[name] if kind == "fp32" else state[name] * 0.5)
    return folder, model


def test_plain_torchvision_loads_it(tmp_path):
    folder, model = made(tmp_path, "resnet18", {}, ImageInputs(channels=3, size=32, classes=7))
    export(folder, tmp_path / "out")
    plain = torchvision.models.resnet18(num_classes=7)
    plain.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(plain.eval()(x), model.eval()(x))


@pytest.mark.parametrize(
    ("name", "args", "inputs"),
    [
        ("mixtral-8x7b", EXPERTS, TEXT),  # one tensor an expert in the files
        ("vit-b-16-hf", {**SHAPE, "patch_size": 8}, IMAGES),  # other names in the files
        ("bert-base", {**SHAPE, "vocab_size": 260}, TEXT),  # tied weight and bias
    ],
)
def test_files_are_those_of_save_pretrained(tmp_path, name, args, inputs):
    folder, model = made(tmp_path, name, args, inputs)
    export(folder, tmp_path / "out")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / f / "model.safetensors") for f in ("out", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    ours, theirs = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("out", "theirs"))
    assert ours == theirs


def test_types_and_buffers(tmp_path):
    folder, model = made(tmp_path, "resnet18-small", {"width": 4}, IMAGES, precision="bf16")
    assert export(folder, tmp_path / "out").dtype == "bf16"  # what the run computed with
    assert export(folder, tmp_path / "full", "fp32").dtype == "fp32"
    narrow, full = (load_file(tmp_path / f / "model.safetensors") for f in ("out", "full"))
    state = model.state_dict()
    for name, tensor in narrow.items():
        buffer = name.endswith(("running_mean", "running_var", "num_batches_tracked"))
        assert tensor.dtype == (state[name].dtype if buffer else torch.bfloat16)
        assert torch.equal(tensor, state[name].to(tensor.dtype)) and torch.equal(full[name], state[name])


def test_shards_hold_no_more_than_asked_for(tmp_path):
    folder, _ = made(tmp_path, "llama-tiny", GROUPED, TEXT)
    done = export(folder, tmp_path / "out", max_shard_bytes=20_000)
    shards = [name for name in done.files if name.startswith("model-")]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    total = 0
    for name in shards:
        tensors = load_file(tmp_path / "out" / name)
        sizes = [t.nbytes for t in tensors.values()]
        assert sum(sizes) <= 20_000 or len(sizes) == 1
        assert {n for n, file in index["weight_map"].items() if file == name} == set(tensors)
        total += sum(sizes)
    assert total == index["metadata"]["total_size"] == 4 * index["metadata"]["total_parameters"]


def test_a_model_that_does_not_fit_is_refused_with_all_that_is_wrong(tmp_path):
    folder, _ = made(tmp_path, "llama-tiny", GROUPED, TEXT)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["job"]["run"]["model_args"] |= {"num_hidden_layers": 1, "intermediate_size": 48, "attention_bias": True}
    rewrite(folder, manifest)
    with pytest.raises(UserError) as caught:
        export(folder, tmp_path / "out")
    kinds = [p.kind for p in caught.value.problems]
    assert (kinds.count("unexpected-tensor"), kinds.count("wrong-shape"), kinds.count("missing-tensor")) == (9, 3, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def rewrite(folder, manifest):
    from zerofit.checkpoint.store import MANIFEST, checksum_of

    manifest.pop("checksum")
    (folder / MANIFEST).write_text(json.dumps({**manifest, "checksum": checksum_of(manifest)}))


def test_nothing_is_overwritten_and_nothing_is_left_behind(tmp_path, monkeypatch):
    folder, _ = made(tmp_path, "llama-tiny", GROUPED, TEXT)
    out = tmp_path / "there"
    out.mkdir()
    export(folder, out)  # an empty folder may be there
    with pytest.raises(UserError, match="already exists"):
        export(folder, out)
    monkeypatch.setattr(
        "zerofit.checkpoint.model_folder.ModelInfo.write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        export(folder, tmp_path / "interrupted")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(UserError, match=r"has 0\.98 KiB free"):
        export(folder, tmp_path / "full")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "there"]


def test_numbers_that_fp16_cannot_hold_are_refused(tmp_path):
    model = build(find("mlp"), IMAGES, {"hidden": 4})
    with torch.no_grad():
        model.head.weight[0, 0] = 1e6
    state = model.state_dict()
    what = Made(model=model, run=Run(model="mlp", model_args={"hidden": 4}), task="image", inputs=IMAGES)
    folder = make(tmp_path / "run", what, lambda name, *_: state[name])
    with pytest.raises(UserError, match=r"head.weight has the value 1e\+06, but float16 ends at 65504"):
        export(folder, tmp_path / "out", "fp16")
    assert not (tmp_path / "out").exists()


def test_own_model_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n\ndef tied(width):\n"
        "    model = nn.Sequential(nn.Linear(width, width, False), nn.Linear(width, width, False))\n"
        "    model[1].weight = model[0].weight\n    return model\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = build(find("mine:tied"), IMAGES, {"width": 6})
    state = model.state_dict()
    what = Made(model=model, run=Run(model="mine:tied", model_args={"width": 6}), task="image", inputs=IMAGES)
    folder = make(tmp_path / "run", what, lambda name, *_: state[name])
    assert export(folder, tmp_path / "out", trust_model_code=True).parameters == 36
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    monkeypatch.delitem(sys.modules, "mine")
    (tmp_path / "mine.py").unlink()
    with pytest.raises(UserError, match="cannot build the run's model mine:tied"):
        export(folder, tmp_path / "again", trust_model_code=True)
