// Draws the charts of a page with uPlot, from the JSON in each <figure class="chart">.
"use strict";

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];
const UNITS = {
  bytes(value) {
    let power = 0;
    while (Math.abs(value) >= 999.5 && power < 4) { value /= 1024; power++; }
    const digits = power === 0 || Math.abs(value) >= 99.95 ? 0 : Math.abs(value) < 9.995 ? 2 : 1;
    return value.toFixed(digits) + " " + BYTES[power];
  },
  seconds: (value) => UNITS.number(value) + " s",
  number: (value) => Number(value.toPrecision(4)).toLocaleString("en"),
};
// Ticks of bytes are whole powers of two, so that labels stay short.
const POWERS = Array.from({ length: 50 }, (_, power) => 2 ** power);

/** The color that a CSS value has on this page: a canvas supports neither variables nor light-dark(). */
function resolved(color) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = color;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** The values to draw: areas are added up from the first one. */
function stacked(lines) {
  let below = null;
  return lines.map((line) => {
    if (line.style !== "area") return line.values;
    below = line.values.map((value, i) => (value || 0) + (below ? below[i] : 0));
    return below;
  });
}

function seriesOf(line, unit) {
  const color = resolved(line.color);
  const area = line.style === "area", dots = line.style === "dots";
  const few = line.values.filter((value) => value != null).length < 40;
  return {
    label: line.label,
    stroke: dots ? undefined : color,
    width: area ? 1 : 2, // without a line, a peak narrower than a pixel would vanish
    dash: line.style === "dashed" ? [6, 4] : undefined,
    fill: area ? color : undefined,
    paths: area ? uPlot.paths.stepped({ align: 1 }) : dots ? () => null : undefined,
    points: { show: dots || (few && !area), size: dots ? 9 : 5, fill: color, stroke: color },
    spanGaps: !dots,
    value: (_, value) => (value == null ? "" : UNITS[unit](value)),
  };
}

function axis(unit, label, side) {
  const wide = side === 3;
  return {
    side, label: wide ? undefined : label, labelSize: 22, size: wide ? 74 : 34, labelFont: "12px system-ui", font: "12px system-ui",
    stroke: resolved("var(--soft)"), grid: { stroke: resolved("var(--line)"), width: 1 }, ticks: { show: false },
    incrs: unit === "bytes" ? POWERS : undefined, space: wide ? 40 : 70,
    values: (_, ticks) => ticks.map(UNITS[unit]),
  };
}

/** Names of phases above the areas, with a line at the start of each phase. A name is left out if it has no room. */
function drawMarks(plot, data) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio;
  ctx.save();
  ctx.font = 11 * ratio + "px system-ui";
  ctx.textBaseline = "top";
  ctx.textAlign = "left";
  data.phases.forEach(([start, name], i) => {
    const left = plot.valToPos(start, "x", true);
    const next = i + 1 < data.phases.length ? plot.valToPos(data.phases[i + 1][0], "x", true) : bbox.left + bbox.width;
    if (next < bbox.left || left > bbox.left + bbox.width) return;
    ctx.fillStyle = resolved("var(--soft)");
    ctx.globalAlpha = 0.4;
    if (left >= bbox.left) ctx.fillRect(left, bbox.top, ratio, bbox.height);
    ctx.globalAlpha = 1;
    const from = Math.max(left, bbox.left), room = Math.min(next, bbox.left + bbox.width) - from;
    if (ctx.measureText(name).width + 8 * ratio < room) ctx.fillText(name, from + 4 * ratio, bbox.top + 2 * ratio);
  });
  if (data.limit) {
    const top = plot.valToPos(data.limit[1], "y", true);
    if (top >= bbox.top && top <= bbox.top + bbox.height) {
      ctx.fillStyle = resolved("var(--bad)");
      ctx.fillRect(bbox.left, top, bbox.width, 1.5 * ratio);
      ctx.textAlign = "right";
      ctx.fillText(data.limit[0], bbox.left + bbox.width - 4 * ratio, top + 4 * ratio);
    }
  }
  ctx.restore();
}

/** The highest value to show, with room for the phases' names. A much higher limit is not shown: it would flatten the chart. */
function topOf(data, drawn) {
  const highest = Math.max(0, ...drawn.map((values) => values.reduce((most, value) => Math.max(most, value ?? 0), 0)));
  const limit = data.limit ? data.limit[1] : 0;
  return (limit > highest && limit <= 2 * highest ? limit : highest) * 1.1 || 1;
}

function describe(data, index, hover) {
  hover.replaceChildren();
  if (index == null) { hover.textContent = "Point at the chart, or select it and press the arrow keys."; return; }
  const shown = data.lines.map((line) => [line.label, line.values[index], line.style]).filter((row) => row[1]);
  const areas = shown.filter((row) => row[2] === "area");
  if (areas.length) shown.splice(0, shown.length, ...areas.sort((a, b) => b[1] - a[1]));
  const total = areas.reduce((sum, row) => sum + row[1], 0);
  const head = document.createElement("b");
  const at = data.hints[index] ?? data.x_label + " " + UNITS[data.x_unit](data.x[index]);
  head.textContent = (total ? UNITS[data.y_unit](total) + "  " : "") + at;
  const rest = shown.map(([label, value]) => label + " " + UNITS[data.y_unit](value)).join(", ");
  hover.append(head);
  if (areas.length || !data.hints.length) hover.append(document.createElement("br"), rest);
}

function chart(figure, data) {
  const columns = stacked(data.lines);
  const reversed = data.lines.map((_, i) => data.lines.length - 1 - i);  // the highest sum is painted first
  const order = data.lines.some((line) => line.style === "area") ? reversed : [...reversed].reverse();
  const hover = Object.assign(document.createElement("div"), { className: "hover" });
  hover.setAttribute("aria-live", "polite");
  const holder = document.createElement("div");
  holder.tabIndex = 0;
  holder.setAttribute("role", "application");
  holder.setAttribute("aria-label", data.title + ": arrow keys move, plus and minus zoom, Escape resets");
  const legend = Object.assign(document.createElement("ul"), { className: "legend" });
  for (const line of data.lines) {
    const item = legend.appendChild(document.createElement("li"));
    const mark = item.appendChild(document.createElement("i"));
    mark.style.background = mark.style.borderColor = line.color;
    mark.className = line.style;
    item.append(line.label);
  }
  if (data.lines.length > 1) figure.append(legend);
  figure.append(holder, hover);
  describe(data, null, hover);
  const first = data.x[0], last = Math.max(data.x[data.x.length - 1], first + 1e-9 + Math.abs(first) * 1e-9);
  const padded = data.lines.some((line) => line.style === "dots") ? 0.04 * (last - first) || 1 : 0;
  const span = [first - padded, last + padded];
  const height = () => Math.round(Math.min(460, Math.max(240, figure.clientWidth * 0.45)));
  let plot = null;

  function draw() {
    plot?.destroy();
    const top = topOf(data, columns);
    plot = new uPlot({
      width: figure.clientWidth, height: height(), legend: { show: false },
      cursor: { drag: { x: true, y: false, uni: 10 }, points: { show: !order.some((i) => data.lines[i].style === "area") } },
      scales: { x: { time: false, range: (_, low, high) => (low == null ? span : low === first && high === last ? span : [low, high]) },
                y: { range: data.zero ? [0, top] : undefined } },
      axes: [axis(data.x_unit, data.x_label, 2), axis(data.y_unit, "", 3)],
      series: [{}, ...order.map((i) => seriesOf(data.lines[i], data.y_unit))],
      hooks: { draw: [(drawn) => drawMarks(drawn, data)], setCursor: [(drawn) => describe(data, drawn.cursor.idx, hover)] },
    }, [data.x, ...order.map((i) => columns[i])], holder);
    figure.plot = plot;
  }

  function move(index) {
    const at = Math.min(data.x.length - 1, Math.max(0, index));
    plot.setCursor({ left: plot.valToPos(data.x[at], "x"), top: plot.over.clientHeight / 2 });
    describe(data, at, hover);
    figure.at = at;
  }

  function zoom(factor) {
    const { min, max } = plot.scales.x, width = (max - min) * factor;
    const middle = figure.at == null ? (min + max) / 2 : data.x[figure.at];
    const low = Math.max(span[0], Math.min(middle - width / 2, span[1] - width));
    plot.setScale("x", { min: low, max: Math.min(span[1], low + width) });
  }

  const reset = () => plot.setScale("x", { min: span[0], max: span[1] });
  const page = Math.max(1, Math.round(data.x.length / 20));
  const keys = {
    ArrowRight: () => move((figure.at ?? -1) + 1), ArrowLeft: () => move((figure.at ?? data.x.length) - 1),
    PageDown: () => move((figure.at ?? -1) + page), PageUp: () => move((figure.at ?? data.x.length) - page),
    Home: () => move(0), End: () => move(data.x.length - 1),
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), Escape: reset, 0: reset,
  };
  holder.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  draw();
  new ResizeObserver(() => { if (plot.width !== figure.clientWidth) plot.setSize({ width: figure.clientWidth, height: height() }); }).observe(figure);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

for (const figure of document.querySelectorAll("figure.chart")) {
  chart(figure, JSON.parse(figure.querySelector("script").textContent));
}
