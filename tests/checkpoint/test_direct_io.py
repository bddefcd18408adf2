"""Numbers read and written past the page cache equal what plain files have."""

import errno
import math
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from zerofit.checkpoint.direct_file import BLOCK, PIECE, UncachedReader, pages_in_cache
from zerofit.checkpoint.direct_io import NumbersFile, buffer, copy
from zerofit.checkpoint.foreign_facts import _torch_file_damage
from zerofit.checkpoint.model_folder import LazyTensor, TensorEntry, TensorFile
from zerofit.checkpoint.store import mark_of


@pytest.fixture(params=["direct", "no O_DIRECT", "refused at the first call"])
def file_system(request, monkeypatch):
    """File systems with and without support for O_DIRECT."""
    real = {name: getattr(os, name) for name in ("open", "preadv", "pwrite")}
    direct = set()

    def opened(path, flags, *rest):
        if flags & os.O_DIRECT and request.param == "no O_DIRECT":
            raise OSError(errno.EINVAL, "Invalid argument")
        file = real["open"](path, flags, *rest)
        (direct.add if flags & os.O_DIRECT else direct.discard)(file)
        return file

    def refused(name):
        def call(file, *rest):
            if file in direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real[name](file, *rest)

        return call

    if request.param != "direct":
        monkeypatch.setattr(os, "open", opened)
        if request.param != "no O_DIRECT":
            monkeypatch.setattr(os, "preadv", refused("preadv"))
            monkeypatch.setattr(os, "pwrite", refused("pwrite"))


@pytest.mark.parametrize("place", [0, 4, BLOCK - 8, BLOCK, 3 * BLOCK + 64])
@pytest.mark.parametrize("count", [1, 5, BLOCK // 4, PIECE // 4 - 1])
def test_numbers_at_any_place(tmp_path, file_system, place, count):
    path = tmp_path / "numbers"
    path.write_bytes(b"\x07" * (place + 4 * count + 9))
    numbers = torch.randn(count)
    with NumbersFile(path, os.O_RDWR) as file:
        out = buffer(place, count, torch.float32)
        copy(out, numbers)
        file.write_edges(file.write(place, out))
    assert path.read_bytes() == b"\x07" * place + numbers.numpy().tobytes() + b"\x07" * 9

    out_of_cache(path)
    with NumbersFile(path) as file:
        assert torch.equal(file.read(place, count, torch.float32), numbers)
        assert torch.equal(file.read(place + 4, count + 9, torch.float32)[: count - 1], numbers[1:])


def test_tensors_that_threads_write_in_pieces(tmp_path, file_system):
    whole = torch.arange(2 * PIECE + 77, dtype=torch.float64).remainder(1001)
    entries = [TensorEntry(name=n, shape=s, dtype=torch.bfloat16) for n, s in {"a": (3,), "b": (len(whole),)}.items()]
    stored = LazyTensor(
        shape=whole.shape, fill=lambda out, start: copy(out, whole[start : start + len(out)]), in_pieces=True
    )
    file = TensorFile(tmp_path / "model.safetensors", entries)
    pieces = [*file.pieces("b", stored), *file.pieces("a", torch.ones(3))]
    with ThreadPoolExecutor(4) as pool:
        written = list(pool.map(lambda piece: piece(), pieces))
    got = load_file(file.path)
    assert torch.equal(got["b"], whole.bfloat16()) and torch.equal(got["a"], torch.ones(3).bfloat16())
    assert sum(written) == 2 * len(whole) + 6 and len(written) > 3


def test_forked_processes_have_buffers_of_their_own(tmp_path):
    """As the ranks of `zerofit.spec.server_process` are forked."""
    files = [tmp_path / name for name in ("parent", "child")]
    for number, path in enumerate(files):
        torch.full((BLOCK,), float(number)).numpy().tofile(path)
    with NumbersFile(files[0]) as file:
        numbers = file.read(0, BLOCK, torch.float32)
        child = os.fork()
        if not child:
            with NumbersFile(files[1]) as other:
                other.read(0, BLOCK, torch.float32)
            os._exit(0)
        os.waitpid(child, 0)
        assert torch.equal(numbers, torch.zeros(BLOCK))


@pytest.mark.parametrize("shape", [(3,), (5, 70_000), (2, 1_200_000)])
def test_zip_files_are_read_past_the_cache(tmp_path, file_system, shape):
    """A part of a file, as PyTorch DCP embeds it. The checksums that zipfile compares are those of every byte."""
    inner, outer = tmp_path / "inner.pt", tmp_path / "outer"
    torch.save({"a": torch.randn(shape), "b": torch.randn(3)}, inner)
    outer.write_bytes(b"\x07" * 777 + inner.read_bytes() + b"\x07" * 99)
    for path in (inner, outer):
        out_of_cache(path)
    with UncachedReader(outer, 777, inner.stat().st_size) as part, zipfile.ZipFile(part) as archive:
        assert archive.testzip() is None
        with zipfile.ZipFile(inner) as plain:
            assert {n: archive.read(n) for n in archive.namelist()} == {n: plain.read(n) for n in plain.namelist()}
    content = bytearray(outer.read_bytes())
    content[777 + inner.stat().st_size // 2] ^= 4
    outer.write_bytes(content)
    with UncachedReader(outer, 777, inner.stat().st_size) as part, zipfile.ZipFile(part) as archive:
        assert shape == (3,) or archive.testzip() is not None


def test_a_zip_file_may_end_with_a_long_list_of_records(tmp_path):
    with zipfile.ZipFile(tmp_path / "file", "w") as archive:
        for number in range(90):
            archive.writestr(f"{number:050000}", b"1")
    with UncachedReader(tmp_path / "file") as file, zipfile.ZipFile(file) as archive:
        assert archive.start_dir + PIECE < (tmp_path / "file").stat().st_size
        assert len(archive.infolist()) == 90 and archive.testzip() is None


def test_files_that_are_no_zip(tmp_path):
    for content in (b"", b"PK", b"x" * 100):
        (tmp_path / "file").write_bytes(content)
        with UncachedReader(tmp_path / "file") as file, pytest.raises(zipfile.BadZipFile):
            zipfile.ZipFile(file)


def out_of_cache(path) -> None:
    with path.open("rb") as plain:
        os.fsync(plain.fileno())
        os.posix_fadvise(plain.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.skipif(pages_in_cache(0, 0, 0) == math.inf, reason="Linux before 6.5 does not count cached pages")
def test_what_is_read_once_does_not_enter_the_cache(tmp_path):
    path, size = tmp_path / "numbers", 5 * PIECE
    torch.save({"a": torch.ones(size // 4)}, path)
    for read in (mark_of, _torch_file_damage_of):
        out_of_cache(path)
        with path.open("rb") as plain:
            before = pages_in_cache(plain.fileno(), 0, size)
            read(path)
            assert pages_in_cache(plain.fileno(), 0, size) - before < 100  # the file has 5,000
            plain.read()
            assert pages_in_cache(plain.fileno(), 0, size) > 5000
            read(path)
            assert pages_in_cache(plain.fileno(), 0, size) > 5000  # what was there stays


def _torch_file_damage_of(path) -> None:
    assert _torch_file_damage(path, "name") == []
