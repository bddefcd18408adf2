"""Find missing packages that an extra installs, and the `pip install` command for them."""

from __future__ import annotations

import importlib.metadata

from zerofit.spec.errors import Problem

# modules whose distribution has another name, or that another distribution installs as a dependency
_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "huggingface_hub": "transformers", "anyio": "mcp"}


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, without an import; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_extra(error: BaseException) -> Problem | None:
    """Return a problem that names the extra whose missing package caused `error`, or None.

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
    """Return for each optional distribution the extra that installs it.

    Distributions that zerofit itself needs are left out.
    """
    from packaging.requirements import Requirement

    found = dict[str, str]()
    for line in importlib.metadata.requires("zerofit") or ():
        requirement = Requirement(line)
        if requirement.marker and requirement.name != "zerofit":  # setuptools writes `extra == "train"`
            found.setdefault(requirement.name.lower(), str(requirement.marker).rpartition("== ")[2].strip('"'))
    return found
