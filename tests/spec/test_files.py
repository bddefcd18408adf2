"""One write for all files that others read: the whole new file or the old one, whatever goes wrong on the way."""

from __future__ import annotations

import errno
import os
import subprocess

import numpy as np
import pytest

from zerofit.spec.files import atomic_write, sync_folder, write_json, write_text
from zerofit.watch.launch_spec import LaunchSpec


def full(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(argv, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_file_appears_whole(tmp_path):
    path = tmp_path / "value.json"
    with atomic_write(path) as file:
        file.write(b"half ")
        file.flush()
        assert not path.exists()
        file.write(b"and whole")
    assert path.read_bytes() == b"half and whole"
    write_json(path, {"ä": [1]})
    assert path.read_text() == '{\n  "\\u00e4": [\n    1\n  ]\n}\n'
    write_text(path, "ä\n")
    assert path.read_bytes() == "ä\n".encode()
    assert os.listdir(tmp_path) == ["value.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch, call):
    path = tmp_path / "value.json"
    write_json(path, "old")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match=r"No space left on device: .*value\.json") as raised:
        write_json(path, "new")
    assert raised.value.errno == errno.ENOSPC and raised.value.filename == str(path)
    assert path.read_text() == '"old"\n' and os.listdir(tmp_path) == ["value.json"]


@pytest.mark.root
def test_a_full_disk(small_disk):
    path = small_disk / "numbers.npy"
    with atomic_write(path) as file:
        np.save(file, np.arange(1000))
    with pytest.raises(OSError, match=r"numbers\.npy"), atomic_write(path) as file:
        np.save(file, np.arange(100_000))
    assert len(np.load(path)) == 1000 and os.listdir(small_disk) == ["numbers.npy"]
    write_text(path, "there is room again")


def test_an_interrupted_write_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / "value") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_errors_name_the_file_that_was_to_be_written(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere/value'$"):
        write_text(tmp_path / "nowhere" / "value", "x")
    with pytest.raises(FileNotFoundError, match="source"), atomic_write(tmp_path / "value"):
        (tmp_path / "source").read_bytes()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"file/value'$"):
        write_text(tmp_path / "file" / "value", "x")
    with pytest.raises(OSError, match=r"nnn'$"):
        write_text(tmp_path / ("n" * 255), "x")


def mode_of(path) -> int:
    return path.stat().st_mode & 0o777


def test_permissions_are_kept_or_given(tmp_path):
    path = tmp_path / "value"
    before = os.umask(0o027)
    try:
        write_text(path, "by umask")
        assert mode_of(path) == 0o640
        path.chmod(0o604)
        write_text(path, "kept")
        assert mode_of(path) == 0o604
        write_text(path, "given", mode=0o666)
        assert mode_of(path) == 0o666
    finally:
        os.umask(before)


def test_a_secret_stays_one_where_a_readable_file_was(tmp_path):
    """An earlier start left files that anyone can read, the last one in the midst of writing."""
    for name in ("launch.json", ".launch.json"):
        (tmp_path / name).touch(mode=0o644)
    spec = LaunchSpec(
        folder="/runs/a",
        token="secret",
        run_id="m",
        attempt=1,
        hosts=("here",),
        watch={"here": ("127.0.0.1", 1)},
        master=("127.0.0.1", 2),
        accelerator="cpu",
        coming_s=1.0,
        timeout_s=1.0,
    )
    spec.write(tmp_path / "launch.json")
    assert mode_of(tmp_path / "launch.json") == 0o600
    assert LaunchSpec.read(tmp_path / "launch.json") == spec


def test_file_and_folder_are_flushed(tmp_path, monkeypatch):
    flushed = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    write_text(tmp_path / "value", "x")
    first, second = flushed
    assert first.startswith(str(tmp_path / ".value.")) and second == str(tmp_path)


def test_a_file_system_that_flushes_no_folders(tmp_path, monkeypatch):
    def refuse(_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse)
    sync_folder(tmp_path)


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    """`--trace /dev/null` and `--output /dev/stdout`, by root too, replace no device by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "all of it\n")
        assert os.read(reader, 100) == b"all of it\n"
    finally:
        os.close(reader)
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    """`--output /dev/stdout > FILE` as root put a file in place of /dev/stdout, and FILE stayed empty."""
    (tmp_path / "folder").mkdir()
    target, redirected = tmp_path / "folder" / "target", tmp_path / "redirected"
    target.write_text("old")
    with redirected.open("w") as file:
        links = {"folder/target": target, f"/proc/self/fd/{file.fileno()}": redirected}
        for number, (there, written) in enumerate(links.items()):
            link = tmp_path / str(number)
            link.symlink_to(there)
            write_text(link, "all of it\n")
            assert link.is_symlink() and written.read_text() == "all of it\n"
    (tmp_path / "loop").symlink_to("loop")
    write_text(tmp_path / "loop", "x")
    with pytest.raises(FileNotFoundError, match=r"dangling'$"):
        (tmp_path / "dangling").symlink_to("nowhere/value")
        write_text(tmp_path / "dangling", "x")
