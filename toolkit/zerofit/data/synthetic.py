"""Synthetic data that can be learned, to test a set-up and to measure speed without a disk."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from zerofit.data.base import Data, Dataset, Integers, LabelledDataset, data_error
from zerofit.data.hashing import cell_hashes, sample_hashes
from zerofit.data.table import TableRows
from zerofit.data.text import mask_tokens, masked_count
from zerofit.models.catalog import find
from zerofit.models.inputs import (
    Fed,
    ImageInputs,
    Inputs,
    LabelledTextInputs,
    NamedInput,
    NamedInputs,
    SegmentationInputs,
    TableInputs,
    TextInputs,
)
from zerofit.models.named_inputs import named_inputs
from zerofit.spec.events import Reporter
from zerofit.spec.model_facts import Task
from zerofit.spec.run import Run

if TYPE_CHECKING:
    import torch

# Each kind has a pattern to learn, so a falling loss shows that training works. Pure noise has none.
STEPS = np.array([1, 1, 1, 1, 3, 3, 7, 12])  # distances to the next token, all equally likely
ROWS, FEATURES, SPREAD = 10_000, 10, 1.5  # size of a synthetic table; SPREAD: noise around a class's center
LARGE = 128  # pixels per side from which loader processes are useful (0.5 ms per image of 224)
POOL = 1 << 21  # random values shared by images; 150,000 new normals per image would take longer than training


def open_synthetic_images(name: str, run: Run, task: Task, progress: Reporter) -> Data:
    """Open 3-channel images of N classes (`synthetic:N`) and of --image-size pixels.

    Defaults are 1,000 classes and 224 pixels; for segmentation 4 classes of pixels and 64 pixels.
    """
    if task == "segmentation":
        classes, size = _size(name, default=4, what="classes"), run.image_size or 64
        make = partial(SyntheticMasks, classes=classes, size=size, seed=run.seed)
        return _split(name, make, SegmentationInputs(channels=3, size=size, classes=classes), 4_000, 200)
    classes, size = _size(name, default=1000, what="classes"), run.image_size or 224
    make = partial(SyntheticImages, classes=classes, size=size, seed=run.seed)
    return _split(name, make, ImageInputs(channels=3, size=size, classes=classes), 50_000, 2_000)


def open_synthetic_table(name: str, run: Run) -> Data:
    """Open rows of 10 numbers around the centers of 10 classes (N with `synthetic:N`)."""
    classes = _size(name, default=10, what="classes")
    # Philox, since the same seed must give the same rows in all processes and on all machines
    generator = np.random.Generator(np.random.Philox(key=run.seed))
    centers = generator.standard_normal((classes, FEATURES))
    labels = generator.integers(classes, size=ROWS)
    rows = centers[labels] + SPREAD * generator.standard_normal((ROWS, FEATURES))
    features, cut = rows.astype(np.float32), ROWS // 5
    train, valid = (
        TableRows(features=features[part], labels=labels[part]) for part in (slice(cut, None), slice(0, cut))
    )
    return Data(name=name, train=train, valid=valid, inputs=TableInputs(features=FEATURES, classes=classes))


def open_synthetic_text(name: str, run: Run, task: Task, seq_len: int) -> Data:
    """Open text with a vocabulary of 256 ids (N with `synthetic:N`)."""
    vocab = _size(name, default=256, what="ids in the vocabulary")
    mask_id = vocab - 1 if task == "masked-lm" else None  # the mask is an id of the vocabulary, but not of the text
    used = vocab if mask_id is None else vocab - 1
    make = partial(SyntheticText, vocab=used, seq_len=seq_len, seed=run.seed, mask_id=mask_id)
    inputs = TextInputs(vocab_size=vocab, seq_len=seq_len, mask_id=mask_id)
    return replace(_split(name, make, inputs, 16_384, 512), unigram_entropy_nats=float(np.log(used)))


def open_synthetic_named(name: str, run: Run, seq_len: int) -> Data:
    """Open noise in the shapes of the model's inputs, which shows memory and speed only."""
    if ":" in name:
        message, hint = f"--data {name}: the model has its own vocabulary", "use --data synthetic"
        raise data_error("data-argument", message, hint)
    fed = Fed(image=(3, run.image_size)) if run.image_size else Fed()
    inputs = named_inputs(find(run.model), dict(run.model_args), seq_len, fed)
    make = partial(SyntheticNamed, inputs=inputs, seed=run.seed)
    return _split(name, make, inputs, 16_384, 512)


def open_synthetic_labelled(name: str, run: Run, task: Task, seq_len: int) -> Data:
    """Open random tokens of 2 or N classes (`synthetic:N`); a text has its first token's class."""
    classes = tuple(str(n) for n in range(_size(name, default=2, what="classes")))
    vocab = max(256, len(classes))
    inputs = LabelledTextInputs(vocab_size=vocab, seq_len=seq_len, classes=classes, pad_id=0, tags=task == "tag")
    make = partial(SyntheticLabelled, inputs=inputs, seed=run.seed)
    return _split(name, make, inputs, 16_384, 512)


def _split(name: str, make: Callable[..., SyntheticSamples], inputs: Inputs, train: int, valid: int) -> Data:
    """Return data with numbers of samples for training and, after them, for validation."""
    return Data(name=name, train=make(n=train, first=0), valid=make(n=valid, first=train), inputs=inputs)


def _size(name: str, default: int, what: str) -> int:
    """Return the N of `synthetic:N`. Raises UserError "data-argument"."""
    argument = name.partition(":")[2]
    if not argument:
        return default
    if not argument.isdecimal() or not 2 <= int(argument) <= 1_000_000:
        message = f"--data {name}: the number of {what} must be 2 to 1,000,000"
        raise data_error("data-argument", message, "use --data synthetic")
    return int(argument)


@dataclass(frozen=True, kw_only=True)
class SyntheticSamples(Dataset):
    """A part of an endless row of samples; sample i is a pure function of (seed, first + i)."""

    n: int
    first: int
    seed: int

    def __len__(self) -> int:
        return self.n


@dataclass(frozen=True, kw_only=True)
class SyntheticPictures(SyntheticSamples, LabelledDataset):
    """Pictures that are generated on demand."""

    classes: int
    size: int  # pixels per side

    @property
    def decodes(self) -> bool:
        """Whether pictures are so large that making a batch takes longer than training on it."""
        return self.size >= LARGE


@dataclass(frozen=True, kw_only=True)
class SyntheticImages(SyntheticPictures):
    """A coarse picture of 8 x 8 colors per class, with noise."""

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """See Dataset.batch; there is no augmentation, so `keys` are unused."""
        import torch
        from torch.nn.functional import interpolate

        # Each seed has two streams of hashes: of labels and of noise.
        numbers = np.asarray(indices) + self.first
        labels = (sample_hashes(numbers, 2 * self.seed) % np.uint64(self.classes)).astype(np.int64)
        pixels = 3 * self.size**2
        (pictures, _), noise = _drawn(self.classes, self.seed), _noise(self.classes, self.seed, pixels)
        # Each image gets a part of the noise that starts at a random position.
        starts = sample_hashes(numbers, 2 * self.seed + 1) % np.uint64(POOL)
        rows = np.stack([noise[start : start + pixels] for start in starts.astype(np.int64)])
        images = torch.from_numpy(rows).view(-1, 3, self.size, self.size)
        coarse = torch.from_numpy(pictures[labels])
        return {
            "inputs": images.add_(interpolate(coarse, size=(self.size, self.size), mode="nearest")),
            "labels": torch.from_numpy(labels),
        }


@dataclass(frozen=True, kw_only=True)
class SyntheticMasks(SyntheticPictures):
    """Three rectangles in their classes' colors on background 0, with noise."""

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """See Dataset.batch; there is no augmentation, so `keys` are unused."""
        import torch

        # All samples share the colors, so these are drawn from the seed alone.
        colors = np.random.Generator(np.random.Philox(key=self.seed)).standard_normal((self.classes, 3))
        numbers, size = np.asarray(indices) + self.first, self.size
        labels = np.zeros((len(numbers), size, size), dtype=np.int64)
        images = np.empty((len(numbers), 3, size, size), dtype=np.float32)
        for image, key in enumerate(sample_hashes(numbers, 2 * self.seed + 1)):
            draw = np.random.Generator(np.random.Philox(key=int(key)))
            for _ in range(3):
                top, left = draw.integers(0, size - size // 4, 2)
                high, wide = draw.integers(size // 4, size // 2 + 1, 2)
                labels[image, top : top + high, left : left + wide] = draw.integers(1, self.classes)
            noise = 0.5 * draw.standard_normal((3, size, size))
            images[image] = colors[labels[image]].transpose(2, 0, 1) + noise
        return {"inputs": torch.from_numpy(images), "labels": torch.from_numpy(labels)}


@lru_cache(maxsize=8)  # images may have a different size in each step
def _noise(classes: int, seed: int, pixels: int) -> np.ndarray:
    """Return noise float32 (POOL + pixels,) that repeats after POOL."""
    return np.resize(_drawn(classes, seed)[1], POOL + pixels)


@lru_cache(maxsize=2)
def _drawn(classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures float32 (classes, 3, 8, 8) and noise float32 (POOL,)."""
    generator = np.random.Generator(np.random.Philox(key=seed))
    pictures = generator.standard_normal((classes, 3, 8, 8), dtype=np.float32)
    return pictures, 0.5 * generator.standard_normal(POOL, dtype=np.float32)


@dataclass(frozen=True, kw_only=True)
class SyntheticText(SyntheticSamples):
    """Token walks: each token is the previous one plus one of STEPS, modulo the vocabulary.

    All tokens are equally frequent, so the unigram entropy is ln(vocabulary). A model that sees the previous token
    reaches the entropy of a step, 1.75 bits (1.21 nats). `mask_id`: makes samples for masked language models.
    """

    vocab: int  # number of tokens used
    seq_len: int
    mask_id: int | None = None

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """See Dataset.batch."""
        import torch

        draws = cell_hashes(np.asarray(indices) + self.first, self.seq_len + 1, self.seed)
        steps = STEPS[(draws % np.uint64(len(STEPS))).astype(np.int64)]
        steps[:, 0] = (draws[:, 0] >> np.uint64(8)) % np.uint64(self.vocab)  # the first token is any of them
        tokens = steps.cumsum(axis=1) % self.vocab
        if self.mask_id is None:
            inputs, labels = tokens[:, :-1], tokens[:, 1:]
        else:
            real = np.full(len(tokens), self.seq_len)
            inputs, labels = mask_tokens(tokens[:, :-1], real, keys, self.mask_id, np.arange(self.vocab))
        return {"inputs": torch.tensor(inputs), "labels": torch.tensor(labels)}

    def targets(self, indices: Integers) -> int:
        """Count every token, or the masked ones."""
        each = self.seq_len if self.mask_id is None else int(masked_count(np.array(self.seq_len)))
        return len(indices) * each


@dataclass(frozen=True, kw_only=True)
class SyntheticLabelled(SyntheticSamples):
    """Random tokens, from which classes and tags follow."""

    inputs: LabelledTextInputs

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """Return "inputs", "attention_mask" and "labels"; `keys` are unused."""
        import torch

        draws = cell_hashes(np.asarray(indices) + self.first, self.inputs.seq_len, self.seed)
        tokens = 1 + (draws % np.uint64(self.inputs.vocab_size - 1)).astype(np.int64)  # 0 is padding
        labels = tokens % len(self.inputs.classes)
        arrays = {"inputs": tokens, "attention_mask": np.ones_like(tokens)}
        arrays["labels"] = labels if self.inputs.tags else labels[:, 0].copy()
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def targets(self, indices: Integers) -> int:
        """Count one label per sample, or per token."""
        return len(indices) * (self.inputs.seq_len if self.inputs.tags else 1)


@dataclass(frozen=True, kw_only=True)
class SyntheticNamed(SyntheticSamples):
    """Noise in the shapes of a model's inputs."""

    inputs: NamedInputs

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """Return the model's tensors: the first as "inputs", the last as "labels", others by name."""
        from zerofit.models.build import batch_keys

        numbers = np.asarray(indices) + self.first
        named = zip(batch_keys(self.inputs), self.inputs.tensors, strict=True)
        return {key: self._noise(tensor, numbers, n) for n, (key, tensor) in enumerate(named)}

    def _noise(self, tensor: NamedInput, numbers: np.ndarray, stream: int) -> torch.Tensor:
        """Return ids, or float32 between -1 and 1, of shape (samples, *shape)."""
        import torch

        hashes = cell_hashes(numbers, math.prod(tensor.shape), 4 * self.seed + stream).reshape(-1, *tensor.shape)
        if tensor.ids is None:
            # float32 represents all numbers of 24 bits exactly.
            return torch.from_numpy((hashes >> np.uint64(40)).astype(np.float32) / 2**23 - 1)
        ids = (hashes % np.uint64(tensor.ids)).astype(np.int64)
        if tensor.first is not None:
            fixed, count = tensor.first
            # transformers refuses an image with more or fewer of these tokens than features (modeling_llava.py).
            ids[ids == fixed] = fixed - 1  # it is only at the beginning
            ids[:, :count] = fixed
        return torch.from_numpy(ids)

    def targets(self, indices: Integers) -> int:
        """Count the labels of each sample."""
        return len(indices) * math.prod(self.inputs.tensors[-1].shape)
