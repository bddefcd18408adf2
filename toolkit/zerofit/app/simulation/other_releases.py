"""Run a command again with other releases of DeepSpeed and transformers."""

from __future__ import annotations

import hashlib
import os
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from filelock import FileLock
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import cache_root

HAS = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"


# An environment on top of this one: `venv` without pip, a .pth file that adds the folders of this environment, and pip
# of this environment to install the releases on top. So only the releases are downloaded, and torch is shared. Then the
# same command, run by that environment's Python, replaces this process.


def rerun_with(releases: Mapping[str, str], places: Mapping[str, str], report: Reporter, *, own: bool) -> None:
    """Replace this process with the same command under these releases.

    Do nothing if they are installed already.

    Args:
        releases: package -> version ("0.19.5"); other packages keep the installed version.
        places: package -> the option that names its version.
        report: gets a note if something is installed.
        own: the command needs releases that zerofit can train with, because it is about a zerofit run.

    Raises UserError if there is no such release, it cannot be installed, or zerofit cannot train with it.
    """
    if not releases:
        return
    problems, missing = Problems(), dict[str, str]()
    needed = [Requirement(line) for line in metadata.requires("zerofit") or ()]
    allowed = {r.name: r.specifier for r in needed if not r.marker or r.marker.evaluate({"extra": "train"})}
    for name, release in releases.items():
        try:
            version = str(Version(release))
        except InvalidVersion:
            hint = f"use a version from `pip index versions {name}`"
            problems.add("bad-value", f"{release!r} is not a version", hint, places[name])
            continue
        if own and not allowed[name].contains(version, prereleases=True):
            message = f"zerofit trains with {name}{allowed[name]}, not {version}"
            hint = "use one of these; only your own script (-- COMMAND) can be simulated with other releases"
            problems.add("release", message, hint, places[name])
        elif not _is(metadata.version(name), version):
            missing[name] = version
    problems.raise_if_any()
    if missing:
        python = python_with(missing, report, where=" ".join(places[name] for name in missing))
        # The process is replaced, so the exit code and the output are those of the new command.
        # Without -P, a file in the current folder could replace a library of the same name.
        os.execv(python, [str(python), "-P", "-m", "zerofit.cli", *sys.argv[1:]])


def python_with(releases: Mapping[str, str], report: Reporter, *, where: str = "") -> Path:
    """Return the Python of an environment with these releases (package -> version).

    Create it if missing. The environment is cached. It extends this environment, and has the versions that these
    packages require. `where`: the flag that an error names. Raises UserError if pip cannot install them.
    """
    named = [f"{name}=={version}" for name, version in sorted(releases.items())]
    # The new environment sees this one's packages through a .pth file. Only what differs is installed.
    below = [path for path in (*site.getsitepackages(), site.getusersitepackages()) if os.path.isdir(path)]
    key = hashlib.sha256("\n".join([sys.version, *below]).encode()).hexdigest()[:8]
    folder = cache_root() / "releases" / "-".join([*named, key])
    folder.parent.mkdir(parents=True, exist_ok=True)
    done, python = folder / "installed", folder / "bin" / "python"
    with FileLock(f"{folder}.lock"):
        if done.exists():
            return python
        report.status(f"installing {' and '.join(named)} next to this environment (only once) ...")
        _run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], where)
        # Debian's default scheme names another folder (local/lib/python3.11/dist-packages).
        own = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
        # Python ignores .pth files in a folder that a .pth file only names. Editable installs need theirs.
        lines = [f"import site; site.addsitedir({path!r})\n" for path in below]
        Path(own, "below.pth").write_text("".join(lines), encoding="utf-8")
        # An isolated build has no torch. DeepSpeed's setup.py would then record torch 0.0.
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation"]
        _run([*pip, *named], where)
        found = _run([python, "-P", "-c", HAS, *sorted(releases)], where).split()
        if not all(_is(has, releases[name]) for name, has in zip(sorted(releases), found, strict=True)):
            message = f"{' and '.join(named)} is in {folder}, but Python finds {' and '.join(found)}"
            raise UserError(Problem(kind="release", message=message, hint="unset PYTHONPATH", where=where))
        done.touch()
    return python


def _is(installed: str, version: str) -> bool:
    """Return whether `installed` is this version, apart from a local part such as "+cpu"."""
    return SpecifierSet(f"=={version}").contains(installed, prereleases=True)


def _run(words: Sequence[object], where: str) -> str:
    env = {**os.environ, "DS_BUILD_OPS": "0"}  # DeepSpeed's ops are compiled when they are used
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, env=env)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or [f"exit code {done.returncode}"]
        message = f"{' '.join(map(str, words[1:4]))} ...: {errors[-1].removeprefix('ERROR: ')}"
        hint = "pip must be able to install it here; `pip index versions` lists the releases"
        raise UserError(Problem(kind="release", message=message, hint=hint, where=where))
    return done.stdout
