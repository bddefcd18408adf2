"""Pages in a headless Chromium: all of them at all widths, light and dark, in one process."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from html import unescape
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FIRST = "<script>const errors = []; addEventListener('error', (event) => errors.push(event.message)); </script>"
FIRST += "<script>addEventListener('securitypolicyviolation', (e) => errors.push('loads ' + e.blockedURI));</script>"
# What a reader does: moves along each chart with the keys, zooms and resets.
LAST = """<script>
const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
addEventListener("load", () => {
  const figures = [...document.querySelectorAll("figure.chart")];
  const charts = figures.map((figure) => {
    const holder = figure.querySelector("[tabindex]"), hover = figure.querySelector(".hover");
    const range = () => [figure.plot.scales.x.min, figure.plot.scales.x.max];
    press(holder, "Home");
    const first = hover.textContent;
    press(holder, "ArrowRight");
    const second = hover.textContent, full = range();
    press(holder, "+");
    return new Promise((done) => setTimeout(() => {
      const zoomed = range();
      press(holder, "Escape");
      setTimeout(() => done({ first, second, full, zoomed, reset: range(), width: figure.plot.width }), 0);
    }, 0));
  });
  const scrolls = (element) => element.closest(".wide, pre");
  const wider = (element) => element.getBoundingClientRect().right > innerWidth + 0.5 && !scrolls(element);
  const wide = [...document.body.querySelectorAll("*")].filter(wider).map((element) => element.outerHTML.slice(0, 90));
  const scrolled = (table) => table.scrollWidth > table.clientWidth + 1 && table.querySelector("td.words");
  const cut = [...document.querySelectorAll(".wide")].filter(scrolled).map((table) => table.innerText.slice(0, 90));
  Promise.all(charts).then((charts) => parent.postMessage({ name: NAME, errors, wide, cut, charts, inner: innerWidth,
    scroll: document.documentElement.scrollWidth, paper: getComputedStyle(document.body).backgroundColor,
    images: document.images.length, text: document.body.innerText }, "*"));
});
</script>"""
HARNESS = """<!doctype html><title>pages</title><pre id="found"></pre><script>
const found = {};
addEventListener("message", ({ data }) => { found[data.name] = data;
  document.getElementById("found").textContent = JSON.stringify(found); });
</script>"""


@dataclass(frozen=True, kw_only=True)
class View:
    """A page at a width, light or dark."""

    page: str
    width: int
    dark: bool = False


def looked_at(pages: Mapping[str, Path], views: list[View], folder: Path) -> dict[View, dict]:
    """Open all views; return what each page showed, its errors, and what is wider than the screen."""
    assert CHROMIUM
    frames = ""
    for number, view in enumerate(views):
        text = pages[view.page].read_text(encoding="utf-8")
        last = LAST.replace("NAME", str(number))
        text = text.replace('<meta charset="utf-8">', f'<meta charset="utf-8">{FIRST}', 1)
        copy = folder / f"view-{number}.html"
        copy.write_text(last.join(text.rsplit("</body>", 1)) + "</body>", encoding="utf-8")
        scheme = "dark" if view.dark else "light"
        style = f"width:{view.width}px;height:900px;border:0;color-scheme:{scheme}"
        frames += f'<iframe src="{copy.as_uri()}" style="{style}"></iframe>'
    (folder / "harness.html").write_text(HARNESS + frames)
    argv = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=2700,1000", "--dump-dom"]
    argv += ["--virtual-time-budget=20000", f"--user-data-dir={folder / 'profile'}", (folder / "harness.html").as_uri()]
    dom = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout
    match = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    assert match, dom[:500]
    found = json.loads(unescape(match[1]) or "{}")
    return {view: found[str(number)] for number, view in enumerate(views) if str(number) in found}
