"""Count every named model's parameters on the meta device and compare them with those stored in models/data.

    python benchmarks/preset_counts.py [WORD...]     # a minute for all; WORDs as of `zerofit models`

The suite counts the smallest model of each template. A new entry's "parameters" are what this prints.
"""

from __future__ import annotations

import sys

import torch

from zerofit.models.build import build, parameter_count
from zerofit.models.catalog import find
from zerofit.models.names import model_table


def main() -> None:
    wrong = 0
    for row in model_table(tuple(sys.argv[1:])):
        with torch.device("meta"):
            counted = parameter_count(build(find(str(row["name"])), None, {}))
        if counted != row["parameters"]:
            wrong += 1
            print(f"{row['name']}: counted {counted}, stored {row['parameters']}")
    print(f"{wrong} differ")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
