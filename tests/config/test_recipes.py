import pytest

from zerofit.config.recipe import peak_lr, weight_decay


@pytest.mark.parametrize(
    ("kind", "optimizer", "batch", "parameters", "lr"),
    [
        ("transformer", "adamw", 16, 1_200_000, 1e-3),
        ("transformer", "adamw", 64, 1_200_000, 2e-3),  # the square root of four
        ("transformer", "adamw", 4096, 1_200_000, 2e-3),  # no further
        ("transformer", "adamw", 16, 61_706, 1.9e-3),  # LeNet
        ("transformer", "adamw", 16, 100, 3e-3),
        ("transformer", "adamw", 1024, 8_000_000_000, 2.9e-4),  # Llama 3 8B was trained with 3e-4
        ("transformer", "adamw", 1024, 175_000_000_000, 1.5e-4),
        ("cnn", "sgd", 16, 25_000_000, 0.1),
        ("cnn", "sgd", 256, 25_000_000, 0.1),
        ("cnn", "sgd", 8192, 25_000_000, 3.2),  # Goyal et al., 2017
        ("transformer", "muon", 16, 100, 0.02),
        ("transformer", "adafactor", 1024, 8_000_000_000, 0.01),
        ("pretrained", "adafactor", 64, 110_000_000, 1e-3),
        ("pretrained", "adamw8bit", 16, 110_000_000, 2e-5),
        ("pretrained", "adamw", 16, 110_000_000, 2e-5),
        ("pretrained", "adamw", 64, 110_000_000, 4e-5),
        ("gan", "adamw", 128, 3_000_000, 2e-4),
        ("transformer", "lamb", 16, 1_200_000, 1e-3),  # a type that only the JSON knows
    ],
)
def test_peak_learning_rates(kind, optimizer, batch, parameters, lr):
    assert peak_lr(kind, optimizer, batch, parameters) == pytest.approx(lr, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "optimizer", "steps", "decay"),
    [
        ("cnn", "sgd", 10, 0.01),
        ("cnn", "sgd", 1798, 0.0038),  # LeNet, 20 epochs of digits in batches of 16
        ("cnn", "sgd", 78_000, 5.7e-4),  # 200 epochs of CIFAR-10 in batches of 128
        ("cnn", "sgd", 450_000, 2.4e-4),  # 90 epochs of ImageNet in batches of 256
        ("cnn", "adamw", 450_000, 0.01),
        ("transformer", "adamw", 400, 0.01),
        ("transformer", None, 400, 0.01),
    ],
)
def test_weight_decay(kind, optimizer, steps, decay):
    assert weight_decay(kind, optimizer, steps) == pytest.approx(decay, rel=0.02)
