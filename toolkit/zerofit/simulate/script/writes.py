"""Keep a script from writing to an experiment tracker or to the hub."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import reduce
from importlib.machinery import ModuleSpec
from types import ModuleType

from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.script.tracker import ScriptTracker

# module -> attributes that save on several ranks together, or on the hub
SAVERS = {
    "transformers.utils.hub": ("PushToHubMixin.push_to_hub",),
    "deepspeed.runtime.engine": ("DeepSpeedEngine.save_16bit_model",),
    "huggingface_hub": ("HfApi.create_repo", "HfApi.upload_folder", "HfApi.upload_file", "HfApi.create_commit"),
    "torch.distributed.checkpoint": ("async_save",),
}
# the same of packages that a script may import
OF_PACKAGES = {
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
    """Skip pushes to the hub, and skip saves that need all ranks.

    (functions in SAVERS and OF_PACKAGES)
    """
    for module, names in savers.items():
        if savers is OF_PACKAGES and module not in sys.modules:
            continue
        for name in names:
            *path, last = name.split(".")
            owner = reduce(getattr, path, importlib.import_module(module))
            replace_in(owner, last, _left_out(meter, name))


def tracking() -> None:
    """Send no metrics to a tracker, and write no event files.

    (torch.utils.tensorboard.SummaryWriter)
    """
    os.environ |= TRACKERS_OFF
    for module in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            replace_in(importlib.import_module(module), "SummaryWriter", SilentWriter)
        except ImportError:
            continue
    sys.meta_path.insert(0, _Disabling())


class _Disabling:
    """Disables W&B when the script imports it, even if the script sets mode="offline".

    (wandb.init)
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "wandb":
            return None
        sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType] - it has what a finder needs
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                original = vars(module)["init"]
                vars(module)["init"] = lambda *args, **kwargs: original(*args, **(kwargs | {"mode": "disabled"}))

            replace_in(spec.loader, "exec_module", executed)
        return spec


def _left_out(meter: ScriptTracker, name: str) -> Callable[..., object]:
    def nothing(*_: object, **__: object) -> object:
        meter.note(f"{name.partition('.')[2] or name}(): writes nothing", here=True)
        if name == "async_save":
            done = Future[None]()
            done.set_result(None)
            return done
        return True if "DeepSpeedEngine" in name else None

    return nothing
