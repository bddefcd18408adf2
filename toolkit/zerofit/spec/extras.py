"""Packages that only an extra installs: finding a missing package, and the `pip install` command for it."""

from __future__ import annotations

import importlib.metadata

from zerofit.spec.errors import Problem

# modules whose distribution has another name, or that another distribution installs as a dependency
_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "huggingface_hub": "transformers", "anyio": "mcp"}


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed. Imports nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_extra(error: BaseException) -> Problem | None:
    """Return the problem if a missing package of an extra has caused an error; None for any other error.

    The extras are those of zerofit's own metadata (pyproject.toml).
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    module = error.name.partition(".")[0]
    distribution = _DISTRIBUTIONS.get(module, module).replace("_", "-")
    extra = extras().get(distribution)
    if extra is None or installed_version(distribution) is not None:  # in this case the installation is damaged
        return None
    message = f"this needs {module}, which is not installed"
    return Problem(kind="not-installed", message=message, hint=f"pip install 'zerofit[{extra}]'")


def extras() -> dict[str, str]:
    """Return the extra that installs each distribution, without the distributions that zerofit itself needs."""
    from packaging.requirements import Requirement

    found = dict[str, str]()
    for line in importlib.metadata.requires("zerofit") or ():
        requirement = Requirement(line)
        if requirement.marker and requirement.name != "zerofit":  # setuptools writes `extra == "train"`
            found.setdefault(requirement.name.lower(), str(requirement.marker).rpartition("== ")[2].strip('"'))
    return found
