"""What a machine without a network lacks for zerofit, as wheels to carry there.

python -m benchmarks.gpu.wheels --out .whl [--python 3.12] [--there benchmarks/gpu/there.txt]

`there.txt` names the packages that the machine has, a line each (`pip list --format=freeze` there). Everything else
that zerofit, DeepSpeed and pytest need is downloaded, or built where it is plain Python.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from email.parser import Parser
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[2]
THERE = Path(__file__).with_name("there.txt")
TESTS = ("pytest", "hypothesis")
MOST_BYTES = 60 * 10**6
GLIBC = range(39, 4, -1)  # manylinux_2_N that a machine of today takes


def main() -> int:
    """0, or 1 where the wheels are larger than a device takes along."""
    asked = parse()
    asked.out.mkdir(parents=True, exist_ok=True)
    lines = [line for line in asked.there.read_text().splitlines() if not line.startswith("#")]
    there = {canonicalize_name(line.partition("==")[0]) for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted, seen = [Requirement(text) for text in (*project["dependencies"], *TESTS)], {"zerofit"}
    _pip("wheel", "--no-deps", "--no-build-isolation", str(ROOT), out=asked.out)
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if name in seen | there or not _applies(requirement, asked.python):
            continue
        seen.add(name)
        print(f"{requirement} ...", flush=True)
        wanted += _requirements(_wheel(requirement, asked.python, asked.out))
    size = sum(path.stat().st_size for path in asked.out.glob("*.whl"))
    print(f"{len(seen)} wheels, {size / 1e6:.1f} MB in {asked.out}")
    return 0 if size <= MOST_BYTES else 1


def _wheel(requirement: Requirement, python: str, out: Path) -> Path:
    """Download the wheel of a package, or build it where there is none and it is plain Python. Return its path."""
    name, tags = canonicalize_name(requirement.name), set(_tags(python))

    def fitting() -> Iterator[Path]:
        for path in out.glob("*.whl"):
            found, _, _, its = parse_wheel_filename(path.name)
            if canonicalize_name(found) == name and its & tags:
                yield path

    platforms = [f"manylinux_2_{n}_x86_64" for n in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64", "any"]
    binary = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    binary += [word for one in platforms for word in ("--platform", one)]
    if not any(fitting()) and not _pip("download", "--no-deps", *binary, str(requirement), out=out, check=False):
        _pip("wheel", "--no-deps", str(requirement), out=out)
    found = next(fitting(), None)
    if found is None:
        raise SystemExit(f"no wheel of {requirement} for Python {python}")
    return found


def _pip(command: str, *words: str, out: Path, check: bool = True) -> bool:
    to = ["--wheel-dir", str(out)] if command == "wheel" else ["--dest", str(out)]
    argv = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *to, *words]
    return subprocess.run(argv, check=check, stderr=None if check else subprocess.DEVNULL).returncode == 0


def _requirements(wheel: Path) -> Iterable[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA") and one.count("/") == 1]
        text = archive.read(name).decode()
    return [Requirement(line) for line in Parser().parsestr(text, headersonly=True).get_all("Requires-Dist") or ()]


def _applies(requirement: Requirement, python: str) -> bool:
    """Whether it is needed there, without extras."""
    place = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    return requirement.marker is None or requirement.marker.evaluate(place)


def _tags(python: str) -> Iterator[Tag]:
    """Yield the tags of wheels that run there."""
    version = tuple(map(int, python.split(".")))
    platforms = [f"manylinux_2_{n}_x86_64" for n in GLIBC] + [
        "manylinux2014_x86_64",
        "manylinux1_x86_64",
        "linux_x86_64",
    ]
    yield from cpython_tags(version, platforms=platforms)
    yield from compatible_tags(version, platforms=platforms)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--there", type=Path, default=THERE)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
