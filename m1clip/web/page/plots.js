"use strict";
/* Plots with uPlot: overlaid runs, one zoom for all plots, keys, and a description for screen readers. */
const COLORS = ["#0b7285", "#d9480f", "#7048e8", "#2b8a3e", "#c2255c", "#b58100", "#1971c2", "#868e96"];
const DARK = ["#4cc3d6", "#ff9b66", "#b197fc", "#69db7c", "#ff8fb1", "#ffd43b", "#74c0fc", "#ced4da"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];

const dark = () => document.documentElement.dataset.theme === "dark";
const color = (index) => (dark() ? DARK : COLORS)[index % COLORS.length];
/* A color of the stylesheet for a canvas, which does not support light-dark(). */
const probe = document.body.appendChild(document.createElement("span"));
probe.hidden = true;
function css(name) { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; }

function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return (value / 1e9).toFixed(2) + "G";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(3)).toString();
}

/* Tick labels, with as many digits as the distance between two ticks needs. */
function labels(ticks) {
  const known = ticks.filter((t) => t !== null && t !== undefined), gap = known.length > 1 ? Math.abs(known[1] - known[0]) : 0;
  let digits = 0;
  while (digits < 5 && Math.abs(gap * 10 ** digits - Math.round(gap * 10 ** digits)) > 1e-6) digits += 1;
  const plain = digits <= 4 && known.every((t) => Math.abs(t) < 1e4);
  return ticks.map((t) => (t === null || t === undefined ? "" : plain && gap ? t.toFixed(digits) : short(t)));
}

/* The range of an axis of percentages, which ends at 0 and 100. */
function percents(u, low, high) {
  if (low === null || low === high) return [0, 100];
  const [min, max] = uPlot.rangeNum(low, high, 0.1, true);
  return [Math.max(0, min), Math.min(100, max)];
}

function smooth(values, weight) {
  if (!weight) return values;
  let kept = 0, norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    kept = weight * kept + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return kept / norm;
  });
}

const Zoom = {
  range: null, whole: null, plots: new Set(), /* whole: the range of all runs shown */
  set(min, max) { this.range = [min, max]; this.apply(); },
  reset() { this.range = null; this.apply(); },
  apply() { for (const plot of this.plots) plot.show(); },
};

const hasOneValue = (series) => series.y.filter((v) => v !== null && v !== undefined).length === 1;

class Plot {
  constructor(title, options = {}) {
    this.options = options; this.series = []; this.u = null; this.key = "";
    this.now = el("span", { class: "now" }); this.heading = el("span", {});
    this.box = el("div", { class: "plot", tabindex: "0", role: "img" });
    this.figure = el("figure", { class: "card" }, el("figcaption", {}, this.heading, this.now), this.box);
    this.rename(title);
    this.figure.dataset.plot = options.id || title;
    this.box.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.fit()).observe(this.box);
    Zoom.plots.add(this);
  }

  rename(title) {
    this.title = title;
    if (this.heading.textContent !== title) this.heading.textContent = title;
  }

  /* series: [{name, index, x, y, dots}]; log: logarithmic scale */
  set(series, { log = false, unit = "" } = {}) {
    this.series = series.filter((each) => each.x.length > 0);
    // A logarithmic axis has no place for a loss at or below 0.
    log &&= series.every((each) => each.y.every((v) => v === null || v === undefined || v > 0));
    this.log = log; this.unit = unit;
    const key = JSON.stringify([this.series.map((each) => [each.name, each.index, each.dash, hasOneValue(each)]), log, unit, dark()]);
    const data = this.data();
    if (!data) {
      this.destroy();
      this.box.replaceChildren(el("div", { class: "none" }, this.options.none || "waiting for the first values"));
      this.now.textContent = "";
      this.box.setAttribute("aria-label", `${this.title}: no values yet`);
      return;
    }
    if (key !== this.key || !this.u) this.make(key, data);
    else { this.u.setData(data, false); this.show(); }
    this.describe();
  }

  data() {
    if (!this.series.length) return null;
    const tables = this.series.map((each) => [each.x, this.log ? each.y.map((v) => (v > 0 ? v : null)) : each.y]);
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  make(key, data) {
    this.destroy(); this.key = key;
    this.box.replaceChildren();
    const axis = { stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid") }, font: "11px system-ui, sans-serif" };
    this.u = new uPlot({
      width: Math.max(200, this.box.clientWidth), height: 210, padding: [8, 10, 0, 0],
      legend: { show: this.series.length > 1, live: false },
      cursor: {
        drag: { x: true, y: false, setScale: false }, points: { size: 6 },
        bind: { dblclick: () => () => { Zoom.reset(); return null; } },
      },
      scales: { x: { time: false }, y: { distr: this.log ? 3 : 1, ...(this.unit === "%" ? { range: percents } : {}) } },
      axes: [{ ...axis, size: 28, values: (u, ticks) => ticks.map((t) => t.toLocaleString("en")) }, { ...axis, size: 54, values: (u, ticks) => labels(ticks) }],
      series: [{}, ...this.series.map((each) => ({
        label: each.name, stroke: each.color || color(each.index), width: each.thin ? 1 : 1.8, spanGaps: true,
        dash: each.dash || DASHES[Math.floor(each.index / COLORS.length) % 4],
        // A single value has no line.
        points: { show: hasOneValue(each) || (each.dots === true && each.x.length < 80), size: 5 },
      }))],
      hooks: {
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          const min = u.posToVal(u.select.left, "x"), max = u.posToVal(u.select.left + u.select.width, "x");
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          Zoom.set(min, max);
        }],
        setCursor: [(u) => this.point(u.cursor.idx)],
      },
    }, data, this.box);
    this.show();
  }

  show() {
    if (!this.u) return;
    const xs = this.u.data[0];
    if (!xs.length) return;
    const range = Zoom.range || Zoom.whole || [xs[0], xs[xs.length - 1]];
    const width = range[1] - range[0];
    this.u.setScale("x", width > 0 ? { min: range[0], max: range[1] } : { min: range[0] - 1, max: range[1] + 1 });
  }

  fit() { if (this.u && this.box.clientWidth > 50) this.u.setSize({ width: this.box.clientWidth, height: 210 }); }
  destroy() { if (this.u) { this.u.destroy(); this.u = null; } this.key = ""; }

  point(index) {
    if (!this.u || index === null || index === undefined) { this.describe(); return; }
    const x = this.u.data[0][index];
    const values = this.series.map((each, i) => this.u.data[i + 1][index]).filter((v) => v !== null && v !== undefined);
    this.now.textContent = `${short(x)}: ${values.map(short).join(", ")}`;
  }

  describe() {
    const words = this.series.filter((each) => !each.thin).map((each) => {
      const known = each.y.filter((v) => v !== null && v !== undefined);
      if (!known.length) return "";
      const last = known[known.length - 1];
      let low = known[0], high = known[0];
      for (const v of known) { if (v < low) low = v; if (v > high) high = v; }
      return `${each.name}: now ${short(last)}${this.unit}, first ${short(known[0])}${this.unit}, lowest ${short(low)}, highest ${short(high)}, ${known.length} points`;
    }).filter(Boolean);
    this.box.setAttribute("aria-label", `${this.title}. ${words.join(". ")}`);
    const first = this.series[0] && this.series[0].y.filter((v) => v !== null && v !== undefined);
    this.now.textContent = first && first.length ? `${short(first[first.length - 1])}${this.unit}` : "";
    this.box.dataset.points = String(first ? first.length : 0);
  }

  press(event) {
    if (!this.u) return;
    const { min, max } = this.u.scales.x, width = max - min, middle = (min + max) / 2;
    const ranges = {
      "+": [middle - width / 4, middle + width / 4], "=": [middle - width / 4, middle + width / 4],
      "-": [middle - width, middle + width],
      ArrowLeft: [min - width / 5, max - width / 5], ArrowRight: [min + width / 5, max + width / 5],
    };
    if (event.key === "0" || event.key === "Escape") { Zoom.reset(); event.preventDefault(); }
    else if (ranges[event.key]) { Zoom.set(...ranges[event.key]); event.preventDefault(); }
  }
}
