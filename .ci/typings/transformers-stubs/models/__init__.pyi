"""The models that zerofit imports by name. Without this stub, pyright reads 2,000 files of all other models."""

from .auto import *  # noqa: F403
from .llama import *  # noqa: F403
