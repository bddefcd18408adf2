"""Keep a script from writing to disk, to a tracker or to the hub."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.script.tracker import ScriptTracker

# module -> attributes that save; libraries that are not installed are skipped
SAVERS = {
    "torch": ("save",),
    "safetensors.torch": ("save_file", "save_model"),
    "transformers": ("PreTrainedModel.save_pretrained", "PreTrainedTokenizerBase.save_pretrained"),
    "transformers.processing_utils": ("ProcessorMixin.save_pretrained",),
    "transformers.configuration_utils": ("PreTrainedConfig.save_pretrained",),
    "transformers.utils.hub": ("PushToHubMixin.push_to_hub",),
    "transformers.trainer_callback": ("TrainerState.save_to_json",),
    "deepspeed.runtime.engine": ("DeepSpeedEngine.save_checkpoint", "DeepSpeedEngine.save_16bit_model"),
    "accelerate": ("Accelerator.save_state", "Accelerator.save_model"),
    "huggingface_hub": ("HfApi.create_repo", "HfApi.upload_folder", "HfApi.upload_file", "HfApi.create_commit"),
    "torch.distributed.checkpoint": ("save", "async_save"),
}
# the same of packages that a script may import
OF_PACKAGES = {
    "peft": ("PeftModel.save_pretrained",),
    "lightning.fabric.plugins.io.torch_io": ("TorchCheckpointIO.save_checkpoint",),
    "lightning_fabric.plugins.io.torch_io": ("TorchCheckpointIO.save_checkpoint",),
}
# environment variables that turn trackers off
TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
}
_CACHES = ("HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")  # variables that name cache folders
_PASSED_OVER = (os.path.expanduser("~/.cache"), tempfile.gettempdir(), "/tmp", "/dev", "/proc")


class SilentWriter:
    """A tensorboard writer that accepts every call and writes nothing."""

    def __init__(self, *_: object, **__: object):
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def __enter__(self) -> SilentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def saving(meter: ScriptTracker, savers: Mapping[str, tuple[str, ...]] = SAVERS) -> None:
    """Save and push nothing, since files would contain zeros. (the functions of SAVERS and OF_PACKAGES)"""
    for module, names in savers.items():
        if savers is OF_PACKAGES and module not in sys.modules:
            continue
        owner_module = importlib.import_module(module)
        for name in names:
            *path, last = name.split(".")
            owner: Any = owner_module
            for part in path:
                owner = getattr(owner, part)
            replace_in(owner, last, _left_out(meter, name))


def tracking() -> None:
    """Send no metrics to a tracker, and write no event files. (torch.utils.tensorboard.SummaryWriter)"""
    os.environ |= TRACKERS_OFF
    for module in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            replace_in(importlib.import_module(module), "SummaryWriter", SilentWriter)
        except ImportError:
            continue


def watch_files(meter: ScriptTracker) -> None:
    """Note the files that the script still opens for writing, by Python's audit events (PEP 578)."""
    seen: set[str] = set()
    here = os.getcwd() + os.sep
    caches = tuple(os.path.abspath(os.environ[name]) for name in _CACHES if os.environ.get(name))

    def opened(event: str, arguments: tuple[object, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], (str, bytes)) or not isinstance(arguments[1], str):
            return
        path = os.path.abspath(os.fsdecode(arguments[0]))
        if (
            set(arguments[1]) & set("wax+")
            and path not in seen
            and (path.startswith(here) or not path.startswith(_PASSED_OVER))
            and not path.startswith(caches)
        ):
            seen.add(path)
            meter.note(f"written by the script before it was stopped: {os.path.relpath(path)}")

    sys.addaudithook(opened)


def _left_out(meter: ScriptTracker, name: str) -> Callable[..., object]:
    def nothing(*_: object, **__: object) -> object:
        meter.note(f"{name.partition('.')[2] or name}(): writes nothing", here=True)
        if name == "async_save":
            done = Future[None]()
            done.set_result(None)
            return done
        return True if "DeepSpeedEngine" in name else () if "pretrained" in name else None

    return nothing
