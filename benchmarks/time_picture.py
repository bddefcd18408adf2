"""Draw forecast over published step times, each by coefficients that were fitted without the figure's own source.

python benchmarks/time_picture.py CASES.json [--results FILE.json] [--out FILE.png]

The forecasts are those that `time_accuracy.py` has written into its results.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from zerofit.report.plot import save

RESULTS = Path(__file__).parent / "results"
# Paul Tol's "bright" scheme, told apart with any color vision (https://personal.sron.nl/~pault/)
GROUPS = {
    "image models": ("#4477AA", "o"),
    "Transformers, other engines": ("#BBBBBB", "o"),
    "Transformers, DeepSpeed": ("#228833", "s"),
    "Transformers, DeepSpeed, offloaded optimizer": ("#EE6677", "^"),
}
NEAR = 1.25  # factors within the shaded band


def main() -> None:
    """Draw one point a figure, with a band of 25 % about the diagonal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path, help="published figures with their settings")
    parser.add_argument("--results", type=Path, default=RESULTS / "time-accuracy.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "time-accuracy.png")
    arguments = parser.parse_args()
    cases = json.loads(arguments.cases.read_text())["cases"]
    ratios = json.loads(arguments.results.read_text())["left_out_ratios"]  # of speeds
    figure = picture([(group_of(c), c["published_step_s"], c["published_step_s"] / ratios[c["id"]]) for c in cases])
    save(figure, arguments.out, "--out", dpi=110)
    print(f"{arguments.out}: {len(cases)} figures")


def group_of(case: dict[str, Any]) -> str:
    """Return the group that a figure is drawn in."""
    if case["image"]:
        return "image models"
    if case["stack"] == "other":
        return "Transformers, other engines"
    offloaded = case["offload_optimizer"] != "none"
    return "Transformers, DeepSpeed, offloaded optimizer" if offloaded else "Transformers, DeepSpeed"


def picture(points: list[tuple[str, float, float]]) -> Any:
    """Return the figure of (group, published seconds, forecast seconds)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    ends = [min(min(p, f) for _, p, f in points) / 1.5, max(max(p, f) for _, p, f in points) * 1.5]
    axes.plot(ends, ends, color="#222222", linewidth=0.8)
    axes.fill_between(ends, [e / NEAR for e in ends], [e * NEAR for e in ends], color="#DDDDDD", alpha=0.6, linewidth=0)
    for group, (color, marker) in GROUPS.items():
        mine = [(published, forecast) for name, published, forecast in points if name == group]
        near = sum(1 / NEAR <= forecast / published <= NEAR for published, forecast in mine)
        label = f"{group}: {near} of {len(mine)} within 25 %"
        axes.scatter(*zip(*mine, strict=True), s=18, color=color, marker=marker, linewidths=0, label=label)
    axes.set(xlim=ends, ylim=ends, xlabel="published step time, s", ylabel="forecast step time, s")
    axes.legend(frameon=False, fontsize="small", loc="upper left")
    return figure


if __name__ == "__main__":
    main()
