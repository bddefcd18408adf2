"""Mixed images, label smoothing and averaged weights are torch's and torchvision's own, whatever ranks there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision.transforms import v2

from zerofit.data.hashing import sample_hashes
from zerofit.data.loader import Order, micro_batches
from zerofit.data.mixing import StepImages
from zerofit.data.opening import open_data
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter
from zerofit.spec.image_sizes import ImageSizes
from zerofit.spec.run import Run
from zerofit.train.loss import weighted_cross_entropy

STEPS, GLOBAL, DECAY, SMOOTHING = 6, 8, 0.7, 0.1
MIXED = {"mixup": 0.2, "cutmix": 1.0, "random_erasing": 0.5}
DIGITS = Run(model="lenet", data="digits", **MIXED)


def whole_batch(data, order: Order, step: int, run: Run = DIGITS) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels of a global batch, mixed by torchvision as a whole."""
    first = step * GLOBAL
    keys = order.keys(first, first + GLOBAL)
    batch = data.train.batch(order.indices(first, first + GLOBAL), keys)
    ways = [v2.MixUp(alpha=run.mixup, num_classes=10), v2.CutMix(alpha=run.cutmix, num_classes=10)]
    torch.manual_seed(int(sample_hashes(keys[:1], 21)[0] >> np.uint64(1)))
    return v2.RandomChoice(ways)(batch["inputs"], batch["labels"])


@pytest.mark.parametrize("micro", [1, 4, 8])
def test_mixed_batches_are_torchvisions_in_any_parts(micro):
    data = open_data(DIGITS, "image", None, Reporter())
    order, images = Order.of(data.train, 0), StepImages.of(DIGITS, STEPS, data.inputs)
    mixed = []
    for step in range(6):
        first = step * GLOBAL
        parts = [range(start, start + micro) for start in range(first, first + GLOBAL, micro)]
        key = int(order.keys(first, first + 1)[0])
        slices = [images.slice(part, step, range(first, first + GLOBAL), key) for part in parts]
        made = list(micro_batches(data.train, order, slices, 0, images.mixing))
        wanted, labels = whole_batch(data, order, step)
        assert torch.equal(torch.cat([one["inputs"] for one in made]), wanted)
        assert torch.equal(torch.cat([one["labels"] for one in made]), labels)
        mixed += ((labels > 0).sum(1) == 2).tolist()
    assert any(mixed)


def test_smoothed_and_mixed_losses_are_torchs():
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, -100])
    wanted = functional.cross_entropy(logits, labels, label_smoothing=SMOOTHING)
    assert torch.allclose(weighted_cross_entropy(logits, labels, 1 / 5, smoothing=SMOOTHING), wanted)
    mixed = torch.rand(6, 5).softmax(-1)
    wanted = functional.cross_entropy(logits, mixed, label_smoothing=SMOOTHING)
    assert torch.allclose(weighted_cross_entropy(logits, mixed, 1 / 6, smoothing=SMOOTHING), wanted)


def test_sizes_grow_by_share_of_the_training():
    run = Run(model="resnet18-small", data="digits", image_sizes="8:0.5,12:0.75,16")
    data = open_data(run, "image", None, Reporter())
    order, images = Order.of(data.train, 0), StepImages.of(run, 8, data.inputs)
    assert data.inputs.size == 16
    slices = (images.slice(range(s, s + 1), s, range(s, s + 1), 0) for s in range(8))
    made = micro_batches(data.train, order, slices, 0)
    assert [one["inputs"].shape[-1] for one in made] == [8, 8, 8, 8, 12, 12, 16, 16]
    for wrong in ("16,8", "8:0.5,16:0.4", "8:0.5", "x"):
        with pytest.raises(ValueError):
            ImageSizes.parse(wrong)
        with pytest.raises(UserError, match="image_sizes"):
            Run(image_sizes=wrong)


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, weights and averages of plain torch on one process."""
    data = open_data(DIGITS, "image", None, Reporter())
    order = Order.of(data.train, 0)
    torch.manual_seed(0)
    model = build(find("lenet"), data.inputs, {})
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for step in range(STEPS):
        images, labels = whole_batch(data, order, step)
        loss = functional.cross_entropy(model(images), labels, label_smoothing=SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        averaged.update_parameters(model)
        losses.append(loss.item())
    return losses, model.state_dict(), averaged.module.state_dict()


HOW = {"model": "lenet", "data": "digits", **MIXED, "label_smoothing": SMOOTHING, "ema": DECAY, "optimizer": "sgd"}
HOW |= {"lr": 0.05, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0, "steps": STEPS}
HOW |= {"global_batch": GLOBAL, "micro_batch": 2}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_averages_are_torchs_and_resume_exactly(pools, tmp_path, reference, stage):
    pool, how = pools(2), {**HOW, "ds_config": f"zero{stage}"}
    whole = pool.train(tmp_path / "whole", save_every=3, eval_every=2, **how)
    losses, weights, averages = reference
    assert whole.losses == pytest.approx(losses, rel=1e-5)
    mine = load_file(tmp_path / "whole/model/model.safetensors")
    mean = load_file(tmp_path / "whole/model-ema/model.safetensors")
    for name in weights:
        torch.testing.assert_close(mine[name], weights[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(mean[name], averages[name], rtol=1e-4, atol=1e-6)
    assert whole.result["eval"]["ema_loss"] != whole.result["eval"]["loss"]
    other = {"ds_config": "zero1"} if stage == 2 else {}  # averages are taken over into another layout, too
    checkpoint = tmp_path / "whole/checkpoints/step-00000003"
    resumed = pool.train(tmp_path / "on", resume=str(checkpoint), eval_every=2, **{**how, **other})
    assert resumed.job.start.same_layout == (stage != 2)
    again = load_file(tmp_path / "on/model-ema/model.safetensors")
    for name in mean:
        exact = {"rtol": 1e-5, "atol": 1e-6} if other else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(again[name], mean[name], **exact)


def test_averages_that_come_after_the_last_step_are_the_weights(pools, tmp_path):
    """A run was stopped in its last evaluation, and goes on with --ema: no step is left to average."""
    run = {"model": "mlp", "data": "digits", "steps": 2}
    pools(2).train(tmp_path / "run", **run, save_every=2)
    trained = pools(2).train(tmp_path / "run", **run, ema=DECAY)
    assert trained.job.start.step == 2
    weights, mean = (load_file(tmp_path / f"run/{name}/model.safetensors") for name in ("model", "model-ema"))
    torch.testing.assert_close(mean, weights, rtol=0, atol=0)
    assert trained.result["eval"]["ema_loss"] == trained.result["eval"]["loss"]


def test_what_cannot_go_together_is_refused(tmp_path):
    from zerofit.app.job.resolve import resolve_job
    from zerofit.spec.run import RunRequest

    def said(**options) -> str:
        with pytest.raises(UserError) as caught:
            resolve_job(RunRequest.of(Run(ranks=2, micro_batch=2, steps=2, **options)))
        return str(caught.value)

    assert "--ema with --pipeline 2" in said(model="lenet", data="digits", ema=0.9, pipeline=2)
    assert "llama-tiny (causal-lm) is not an image classifier" in said(model="llama-tiny", data="synthetic", mixup=0.2)
    assert "lenet does not accept images of shape" in said(model="lenet", data="digits", image_sizes="8:0.5,16")
    assert "the first step sets the shape" in said(
        model="resnet18-small", data="digits", image_sizes="8:0.5,16", pipeline=2
    )


def test_pretrained_folders_begin_alike_at_every_stage(pools, tmp_path):
    """A ViT's folder, a CNN's RUN/model: the same first losses, which are those of the library, head drawn anew."""
    import transformers

    config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config |= {"image_size": 8, "patch_size": 4, "num_channels": 1}
    torch.manual_seed(1)
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(**config, num_labels=10)).eval()
    vit.save_pretrained(tmp_path / "vit")
    other = transformers.ViTForImageClassification(transformers.ViTConfig(**config, num_labels=4))
    other.save_pretrained(tmp_path / "four")
    pool, how = pools(2), {"data": "digits", "steps": 1, "micro_batch": 4, "lr": 1e-9}
    lenet = pool.train(tmp_path / "lenet", **{**how, "model": "lenet", "steps": 3, "lr": 0.05})
    data = open_data(Run(model="lenet", data="digits"), "image", None, Reporter())
    batch = data.train.batch(Order.of(data.train, 0).indices(0, 8), range(8))
    cnn = build(find("lenet"), data.inputs, {})
    cnn.load_state_dict(load_file(lenet.folder.model / "model.safetensors"))
    for name, model in {"vit": vit, "lenet/model": cnn}.items():
        with torch.no_grad():
            out = model(batch["inputs"])
        wanted = functional.cross_entropy(getattr(out, "logits", out), batch["labels"]).item()
        for stage in (0, 3):
            run = pool.train(tmp_path / f"{name}-{stage}", model=str(tmp_path / name), ds_config=f"zero{stage}", **how)
            assert run.losses[0] == pytest.approx(wanted, rel=1e-5)
    four = [
        pool.train(tmp_path / f"four-{s}", model=str(tmp_path / "four"), ds_config=f"zero{s}", **how) for s in (0, 3)
    ]
    assert four[0].losses == pytest.approx(four[1].losses, rel=1e-6)
