"""The sub-rooms of `simulate` import one way: each only those above it in the package's docstring."""

from __future__ import annotations

import re

import pytest

from tests.test_structure import PACKAGE, imports_of, modules

ORDER = re.findall(r"^    (\w+)/ ", (PACKAGE / "simulate" / "__init__.py").read_text(), re.MULTILINE)
SHARED = ("record", "endings")  # what leaves a process: they belong to no room


def test_every_folder_is_a_room():
    folders = {path.name for path in (PACKAGE / "simulate").iterdir() if (path / "__init__.py").exists()}
    assert folders == set(ORDER)


@pytest.mark.parametrize("room", ORDER)
def test_a_room_imports_only_those_above_it(room):
    allowed = {*ORDER[: ORDER.index(room) + 1], *SHARED}
    wrong = []
    for name in modules():
        if name.startswith(f"zerofit.simulate.{room}."):
            inside = [i for i in imports_of(name) if i.startswith("zerofit.simulate.")]
            wrong += [(name, i) for i in inside if i.split(".")[2] not in allowed]
    assert not wrong
