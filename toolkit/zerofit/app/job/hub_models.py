"""Find hub models by name. A snapshot in the hub's cache is used like a pretrained folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from zerofit.data.hf import hub_if_reachable
from zerofit.models.catalog import NAMES, shape_named, weight_names
from zerofit.models.names import Match, left_out, preset_of
from zerofit.spec.errors import Problem, UserError, reason_of
from zerofit.spec.events import Reporter
from zerofit.spec.foreign import Unreadable
from zerofit.spec.named_code import names_callable
from zerofit.spec.run import RunRequest

PREFIX = "hub:"
FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")  # config, weights, tokenizer
PICKLED = "pytorch_model*"  # downloaded only if there are no other weights


# The model's name, in order: "hub:..." is downloaded; a path or code is used as it is; any other name may be another
# spelling of a preset.
def with_local_model(request: RunRequest, report: Reporter) -> RunRequest:
    """Replace a hub model's name, hub:ORG/NAME[@REVISION], with the folder of its snapshot.

    A missing snapshot is downloaded; an interrupted download resumes. Another spelling of a preset's name
    ("llama3-8b") is replaced with the preset's name, with a note. Raises UserError if the hub has no such model, or
    if the hub is unreachable and the model is not in the cache.
    """
    name = request.run.model
    if name.startswith(PREFIX):
        return request.updated(model=str(_snapshot(name.removeprefix(PREFIX), request.place("model"), report)))
    # These names are paths or code, never another spelling of a preset.
    if "/" in name or Path(name).exists() or names_callable(name):
        return request
    request = _with_preset(request, preset_of(name), report)
    if note := left_out(request.run.model):
        report.note(note)
    return request


def with_shape(request: RunRequest, report: Reporter) -> RunRequest:
    """Return the request with a preset of the hub model's shape, which is all a forecast needs."""
    return _with_preset(request, shape_named(request.run.model), report) if request.run.model else request


def _with_preset(request: RunRequest, match: Match | None, report: Reporter) -> RunRequest:
    if match is None:
        return request
    if match.note:
        report.note(match.note)
    return request.updated(model=match.name)


def _snapshot(name: str, place: str, report: Reporter) -> Path:
    from huggingface_hub import constants, list_repo_files, snapshot_download

    repository, _, revision = name.partition("@")
    report.status(f"looking for {repository} on the hub and in {constants.HF_HUB_CACHE} ...")
    try:
        with hub_if_reachable():
            # A repository may have the same weights in several formats. Only one of them is downloaded.
            patterns: list[str] = [*FILES]
            if not constants.HF_HUB_OFFLINE:
                files = list_repo_files(repository, revision=revision or None)
                patterns += [] if any(file.endswith(".safetensors") for file in files) else [PICKLED]
            download = partial(snapshot_download, repository, revision=revision or None, allow_patterns=patterns)
            # huggingface_hub before 2 requests a commit even if it is offline
            folder = Path(download(local_files_only=constants.HF_HUB_OFFLINE))
    except Exception as error:  # the hub client raises errors of many unrelated types
        raise _not_there(name, f"is unavailable: {reason_of(error)}", place, str(constants.HF_HUB_CACHE)) from None
    missing = missing_files(folder)
    if missing:
        what = f"lacks {', '.join(missing[:3])} in {folder}"
        raise _not_there(name, what, place, str(constants.HF_HUB_CACHE))
    return folder


def missing_files(folder: Path) -> list[str]:
    """Return the parts of a pretrained model that a snapshot lacks: config or files of weights."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    try:
        names = weight_names(folder) or [NAMES[0]]
    except Unreadable as error:
        return [*missing, f"a valid index of weights ({error.reason})"]
    return missing + [name for name in names if not (folder / name).is_file()]


def _not_there(name: str, what: str, place: str, cache: str) -> UserError:
    repository = name.partition("@")[0]
    hint = (
        f"where there is a network, run `hf download {repository}`, then copy the files into {cache} (or HF_HUB_CACHE)"
    )
    hint += "; or use the folder of a model"
    return UserError(Problem(kind="hub-model", message=f"{PREFIX}{name} {what}", hint=hint, where=place))
