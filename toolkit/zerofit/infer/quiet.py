"""Silence of libraries whose output would disturb the progress shown."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Within it transformers and accelerate print no bars, reports and warnings; zerofit tells what they would."""
    from transformers.utils import logging as theirs

    levels = {name: logging.getLogger(name).level for name in ("accelerate.big_modeling", "accelerate.utils.modeling")}
    verbosity = theirs.get_verbosity()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.set_verbosity(verbosity)
        theirs.enable_progress_bar()
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
