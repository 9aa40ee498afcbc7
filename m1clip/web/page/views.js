"use strict";
/* Everything but curves: examples, similarity matrix, confusions, bars, time split. Text is set, never parsed. */
const PHASES = ["data", "copy", "forward", "backward", "exchange", "optimizer", "step", "rest"];
const PHASE_COLORS = { data: "#e8a200", copy: "#c2255c", forward: "#1098ad", backward: "#3b5bdb", exchange: "#e8590c", optimizer: "#2b8a3e", step: "#1098ad", rest: "#868e96" };
const NOTHING = "nothing measured yet";
const percent = (fraction, digits = 1) => (100 * fraction).toFixed(digits) + "%";

function thumb(run, image, right, words) {
  const mark = el("span", { class: "tick", "aria-hidden": "true" }, right ? "✓" : "✕");
  const alt = right ? "the correct image" : "another image";
  return el("figure", { class: right ? "thumb right" : "thumb" },
    el("img", { src: `/thumbnail?run=${run}&index=${image}`, alt, loading: "lazy", width: "70", height: "70" }), mark, words);
}

function showQueries(box, run, snapshot) {
  box.replaceChildren(...snapshot.queries.map((query) => el("div", { class: "query" },
    el("div", {}, el("p", {}, query.caption),
      el("p", { class: "hint" }, query.rank === 1 ? "its image is ranked first" : `its image has rank ${query.rank} of ${snapshot.images}`)),
    el("div", { class: "thumbs" }, ...query.found.map((image, i) => thumb(run, image, query.correct[i], query.scores[i].toFixed(2)))))));
}

function showConfusions(box, run, snapshot) {
  if (!snapshot.confusions.length) {
    box.replaceChildren(el("p", { class: "hint" }, "None: every caption retrieves its own image first."));
    return;
  }
  box.replaceChildren(...snapshot.confusions.map((each) => el("div", { class: "confusion" },
    el("div", { class: "thumbs" }, thumb(run, each.right, true, "correct"), thumb(run, each.found, false, "retrieved")),
    el("div", {}, el("p", {}, `“${each.caption}”`),
      el("p", { class: "hint" }, `retrieved instead: “${each.truth}”, more similar by ${each.margin.toFixed(3)}`)))));
}

/* Perceptually uniform, from dark blue to yellow. */
const RAMP = [[48, 18, 59], [65, 68, 135], [42, 120, 142], [34, 168, 132], [122, 209, 81], [253, 231, 37]];
function ramp(fraction) {
  const at = Math.min(0.9999, Math.max(0, fraction)) * (RAMP.length - 1), low = Math.floor(at), part = at - low;
  return RAMP[low].map((value, i) => Math.round(value + (RAMP[low + 1][i] - value) * part));
}

function showMatrix(canvas, words, snapshot) {
  const { values, captions } = snapshot.matrix, size = values.length, cell = Math.floor(480 / size);
  const low = Math.min(...values.flat()), high = Math.max(...values.flat());
  const right = values.filter((row, i) => captions[row.indexOf(Math.max(...row))] === captions[i]).length;
  canvas.width = canvas.height = cell * size;
  const pen = canvas.getContext("2d");
  values.forEach((row, i) => row.forEach((value, j) => {
    const [r, g, b] = ramp(high > low ? (value - low) / (high - low) : 0);
    pen.fillStyle = `rgb(${r} ${g} ${b})`;
    pen.fillRect(j * cell, i * cell, cell, cell);
  }));
  const scale = `Colors range from ${low.toFixed(2)} (dark) to ${high.toFixed(2)} (bright).`;
  const text = `${right} of ${size} images are closest to their own caption. ${scale}`;
  words.textContent = text;
  canvas.setAttribute("aria-label", `Similarity matrix at step ${snapshot.step}: ${text}`);
  canvas.onmousemove = (event) => {
    const box = canvas.getBoundingClientRect();
    const i = Math.floor((event.clientY - box.top) / box.height * size);
    const j = Math.floor((event.clientX - box.left) / box.width * size);
    const value = values[i]?.[j];
    if (value !== undefined) words.textContent = `${value.toFixed(2)}: image of “${captions[i]}”, caption “${captions[j]}”`;
  };
  canvas.onmouseleave = () => { words.textContent = text; };
}

function card(title, id) {
  const body = el("div", {}), now = el("span", { class: "now" });
  const figure = el("figure", { class: "card" }, el("figcaption", {}, el("span", {}, title), now), body);
  figure.dataset.panel = id;
  return { figure, body, now };
}

function hint(body, words) { body.className = ""; body.replaceChildren(el("p", { class: "hint" }, words)); }

/* rows: [[name, value, words]] */
function bars(body, rows, top) {
  if (!rows.length) { hint(body, NOTHING); return; }
  const parts = [];
  for (const [name, value, words] of rows) {
    const fill = el("div", {});
    fill.style.width = `${Math.min(100, Math.max(0, 100 * value / (top || 1)))}%`;
    parts.push(el("span", {}, name), el("div", { class: "track", "aria-hidden": "true" }, fill), el("span", {}, words));
  }
  body.className = "bars";
  body.replaceChildren(...parts);
}

function showSplit(body, now, seconds) {
  const parts = PHASES.filter((name) => typeof seconds[name] === "number");
  const total = parts.reduce((sum, name) => sum + seconds[name], 0);
  if (!total) { hint(body, NOTHING); return; }
  const words = parts.map((name) => `${name} ${percent(seconds[name] / total, 0)}`);
  const bar = el("div", { class: "split", role: "img", "aria-label": words.join(", ") });
  for (const name of parts) {
    const part = el("div", { title: name });
    part.style.width = `${100 * seconds[name] / total}%`;
    part.style.background = PHASE_COLORS[name];
    bar.append(part);
  }
  const legend = el("div", { class: "legend" });
  for (const name of parts) {
    const box = el("i", {});
    box.style.background = PHASE_COLORS[name];
    legend.append(el("span", {}, box, `${name} ${percent(seconds[name] / total, 1)}`));
  }
  body.replaceChildren(bar, legend);
  now.textContent = total < 0.1 ? `${(1000 * total).toFixed(1)} ms per step` : `${total.toFixed(2)} s per step`;
}
