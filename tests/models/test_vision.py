"""Every image classifier takes other channels and class counts; wrong sizes are refused with the knob to turn."""

import pytest
import torch
import torchvision

from tests.models.small import count_parameters
from zerofit.models.build import build, check_forward
from zerofit.models.catalog import ModelError, find
from zerofit.models.inputs import ImageInputs
from zerofit.models.presets import NAMED

OTHER_SIZES = {"inception_v3": 299}
# of each kind of network; the others have more or wider layers of the same
SMALLEST = [
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3"),
    *("maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18"),
    *("resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "squeezenet1_1", "swin_t", "swin_v2_t"),
    *("vgg11", "vgg11_bn", "vit_b_32", "wide_resnet50_2"),
]


def test_a_network_of_each_kind_is_tested():
    names = torchvision.models.list_models(module=torchvision.models)
    tested, kinds = ({torchvision.models.get_model_builder(n).__module__ for n in some} for some in (SMALLEST, names))
    assert tested == kinds


@pytest.mark.parametrize("name", SMALLEST)
def test_three_classes_and_one_channel(name):
    inputs = ImageInputs(channels=1, size=OTHER_SIZES.get(name, 224), classes=3)
    with torch.device("meta"):
        model = build(find(name), inputs, {}).eval()
        assert model(torch.zeros(2, 1, inputs.size, inputs.size)).shape == (2, 3)
    check_forward(model, find(name), inputs)


@pytest.mark.parametrize("name", ["simplecnn", "lenet", "mlp", "resnet18-small"])
@pytest.mark.parametrize(("channels", "size", "classes"), [(1, 8, 10), (1, 28, 10), (3, 32, 7), (3, 224, 2)])
def test_our_classifiers_fit_their_images(name, channels, size, classes):
    inputs = ImageInputs(channels=channels, size=size, classes=classes)
    model = build(find(name), inputs, {})
    assert model(torch.randn(2, channels, size, size)).shape == (2, classes)


def test_simplecnn_takes_any_size():
    for size in (1, 2, 3, 5, 17):
        model = build(find("simplecnn"), ImageInputs(channels=2, size=size, classes=4), {})
        assert model(torch.randn(2, 2, size, size)).shape == (2, 4)


def test_the_lenet_from_scratch_is_the_textbook_s():
    """Its forward by torch's functions alone, as chapter 13.5 of "Dive into Deep Learning" writes it."""
    torch.manual_seed(0)
    model = build(find("lenet-scratch"), ImageInputs(channels=1, size=28, classes=10), {})
    w = [p.detach() for p in model.parameters()]
    assert [tuple(p.shape) for p in w[::2]] == [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]
    assert all(p.std().item() == pytest.approx(0.01, rel=0.2) for p in w[::2]) and not any(p.any() for p in w[1::2])
    for p in w:
        p.mul_(20)  # or the logits would be too small to compare
    x = torch.randn(3, 1, 28, 28)
    pool = torch.nn.functional.avg_pool2d
    one = pool(torch.relu(torch.nn.functional.conv2d(x, w[0], w[1])), 2)
    two = pool(torch.relu(torch.nn.functional.conv2d(one, w[2], w[3])), 2)
    three = torch.relu(two.reshape(3, -1) @ w[4].t() + w[5])
    torch.testing.assert_close(model(x), three @ w[6].t() + w[7], rtol=1e-4, atol=1e-5)


def linear(inputs, outputs):
    return inputs * outputs + outputs


def conv(inputs, outputs, kernel, bias=True):
    return inputs * outputs * kernel**2 + bias * outputs


def resnet18(channels, bias):
    """Each convolution is followed by a batch norm of two vectors."""

    def norm_conv(*sizes):
        return conv(*sizes, bias) + 2 * sizes[1]

    total = norm_conv(channels, 64, 3)
    for inputs, outputs in ((64, 64), (64, 128), (128, 256), (256, 512)):
        total += norm_conv(inputs, outputs, 3) + 3 * norm_conv(outputs, outputs, 3)
        total += norm_conv(inputs, outputs, 1) if inputs != outputs else 0
    return total + linear(512, 10)


@pytest.mark.parametrize(
    ("name", "by_hand", "figure"),
    [
        ("simplecnn-112", conv(3, 64, 3) + linear(64 * 56 * 56, 10), 2_008_842),
        ("lenet-scratch", conv(1, 20, 3) + conv(20, 50, 5) + linear(50 * 4 * 4, 128) + linear(128, 10), 129_068),
        ("resnet18-bias", resnet18(channels=1, bias=True), 11_177_610),
        ("resnet18-small", resnet18(channels=3, bias=False), 11_173_962),
        ("mlp-table", linear(10, 100) + linear(100, 10), 2_110),
    ],
)
def test_parameters_layer_by_layer(name, by_hand, figure):
    assert (count_parameters(find(name)), NAMED[name].parameters) == (by_hand, by_hand) == (figure, figure)


def test_resnet18_bias_has_the_biases_of_its_convolutions_and_nothing_else():
    inputs = ImageInputs(channels=3, size=32, classes=10)
    with torch.device("meta"):
        plain, biased = (build(find(name), inputs, {}) for name in ("resnet18-small", "resnet18-bias"))
    convolutions = {path for path, module in plain.named_modules() if isinstance(module, torch.nn.Conv2d)}
    added = {path for path, _ in biased.named_parameters()} - {path for path, _ in plain.named_parameters()}
    assert added == {f"{path}.bias" for path in convolutions}


def test_weights_come_from_the_global_seed():
    inputs = ImageInputs(channels=1, size=32, classes=3)
    weights = []
    for _ in range(2):
        torch.manual_seed(9)
        weights.append(build(find("resnet18"), inputs, {}).state_dict())
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.parametrize("size", [8, 28, 32, 64])
def test_dcgan_draws_images_of_the_data_s_size(size):
    inputs = ImageInputs(channels=3, size=size, classes=10)
    torch.manual_seed(0)
    pair = build(find("dcgan"), inputs, {})
    images = pair.generator(torch.randn(4, pair.generator.latent_size, 1, 1))
    assert images.shape == (4, 3, size, size) and images.abs().max() <= 1
    assert pair.discriminator(images).shape == (4, 1)
    assert pair.generator[0].weight.std().item() == pytest.approx(0.02, rel=0.05)
    check_forward(pair.to("meta"), find("dcgan"), inputs)


def refused(name, size, args=None, channels=3):
    inputs = ImageInputs(channels=channels, size=size, classes=3)
    with pytest.raises(ModelError) as caught, torch.device("meta"):
        check_forward(build(find(name), inputs, args or {}), find(name), inputs)
    return caught.value


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("alexnet", 8),
        ("inception_v3", 32),
        ("vit_b_16", 30),
        ("maxvit_t", 100),
        ("dcgan", 48),
        ("lenet", 2),
        ("vit-b-16-hf", 28),
    ],
)
def test_wrong_image_sizes(name, size):
    error = refused(name, size)
    assert error.kind == "model-shape"
    assert str(size) in error.message and "--image-size" in error.hint


def test_wrong_arguments():
    assert "width" in refused("simplecnn", 32, {"widht": 3}).hint
    assert refused("simplecnn", 32, {"widht": 3}).kind == "model-args"
    assert refused("resnet18", 32, {"depth": 3}).kind == "model-args"
    assert refused("resnet50", 32, {"groups": -1}).kind == "model-args"
    assert "divisible" in refused("simplecnn", 32, {"width": 1.5}).message
    assert refused("resnet18", 64, {"num_classes": 2}).kind == "model-shape"


def test_a_small_image_gets_a_smaller_patch():
    inputs = ImageInputs(channels=1, size=8, classes=10)
    with torch.device("meta"):
        model = build(find("vit-b-16-hf"), inputs, {})
    config = model.config
    assert (config.image_size, config.patch_size, config.num_channels, config.num_labels) == (8, 2, 1, 10)
    check_forward(model, find("vit-b-16-hf"), inputs)
