"use strict";
/* Everything but curves: examples, similarity matrix, confusions, bars, time split. Text is set, never parsed. */
const PHASES = ["data", "copy", "preprocess", "forward", "backward", "exchange", "optimizer", "step", "rest"];
const PHASE_COLORS = { data: "#e8a200", copy: "#c2255c", preprocess: "#9c36b5", forward: "#1098ad", backward: "#3b5bdb", exchange: "#e8590c", optimizer: "#2b8a3e", step: "#1098ad", rest: "#868e96" };
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

/* A heat map: one strip per layer over the evaluations, colored on one logarithmic scale. rows: [{step, value: {layer: number}}] */
function showHeatMap(card, analysis, rows) {
  const layers = [...new Set(rows.flatMap((row) => Object.keys(row.value)))];
  const known = rows.flatMap((row) => Object.values(row.value)).filter((v) => typeof v === "number" && v > 0);
  card.figure.classList.add("wide");
  if (!layers.length) { hint(card.body, "waiting for the first evaluation"); card.now.textContent = ""; return; }
  const low = Math.log10(Math.min(...known)), high = Math.log10(Math.max(...known));
  const scale = known.length ? `${short(10 ** low)} (dark) to ${short(10 ** high)} (bright), logarithmic` : "no value above 0 so far";
  const lines = layers.map((layer) => {
    const values = rows.map((row) => row.value[layer]);
    const last = values[values.length - 1];
    const shown = typeof last === "number" ? short(last) : String(last ?? "-"); // the log writes NaN as text
    const strip = el("canvas", { role: "img", "aria-label": `${layer}: first ${typeof values[0] === "number" ? short(values[0]) : values[0]}, now ${shown}, ${values.length} evaluations` });
    strip.width = values.length; strip.height = 1;
    const pen = strip.getContext("2d");
    values.forEach((value, i) => {
      if (typeof value !== "number") return; // transparent
      const [r, g, b] = ramp(value > 0 ? (high > low ? (Math.log10(value) - low) / (high - low) : 0.5) : 0);
      pen.fillStyle = `rgb(${r} ${g} ${b})`;
      pen.fillRect(i, 0, 1, 1);
    });
    strip.onmousemove = (event) => {
      const box = strip.getBoundingClientRect(), i = Math.min(values.length - 1, Math.floor((event.clientX - box.left) / box.width * values.length));
      if (rows[i]) card.now.textContent = `${layer}, step ${count(rows[i].step)}: ${typeof values[i] === "number" ? short(values[i]) : values[i] ?? "-"}`;
    };
    strip.onmouseleave = () => { card.now.textContent = scale; };
    return el("tr", {}, el("th", { scope: "row" }, layer), el("td", { class: "cell" }, strip), el("td", {}, shown));
  });
  const steps = rows.length > 1 ? `steps ${count(rows[0].step)} to ${count(rows[rows.length - 1].step)}` : `step ${count(rows[0].step)}`;
  const head = el("tr", {}, el("th", { scope: "col" }, "layer"), el("th", { scope: "col" }, `evaluations at ${steps}`), el("th", { scope: "col" }, "last"));
  card.body.className = "";
  card.body.replaceChildren(el("p", { class: "hint" }, `${analysis.meaning[0].toUpperCase()}${analysis.meaning.slice(1)}.`),
    el("table", { class: "heat" }, el("thead", {}, head), el("tbody", {}, ...lines)));
  card.body.dataset.columns = String(rows.length);
  card.now.textContent = scale;
}

/* A table of text: { head: [name], rows: [[cell]] } */
function showTable(card, table, words) {
  card.figure.classList.add("wide");
  if (!table?.rows.length) { hint(card.body, "waiting for the first log lines"); return; }
  const head = el("tr", {}, ...table.head.map((name) => el("th", { scope: "col" }, name)));
  const lines = table.rows.map(([first, ...cells]) => el("tr", {}, el("th", { scope: "row" }, first), ...cells.map((cell) => el("td", {}, cell))));
  card.body.className = "scroll";
  card.body.dataset.rows = String(lines.length);
  card.body.replaceChildren(el("p", { class: "hint" }, words), el("table", { class: "values" }, el("thead", {}, head), el("tbody", {}, ...lines)));
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

/* rows: [[name, text]] */
function facts(body, rows) {
  if (!rows.length) { hint(body, NOTHING); return; }
  body.className = "facts";
  body.replaceChildren(el("table", {}, el("tbody", {}, ...rows.map(([name, text]) =>
    el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, text))))));
}

/* Memory by component: [[name, bytes]], and why a component is missing. */
function showMemory(card, parts, peak, reasons) {
  const largest = Math.max(...parts.map(([, value]) => value));
  const rows = parts.map(([name, v]) => [name, v, `${(v / 1e6).toFixed(0)} MB${peak ? `, ${percent(v / peak, 0)}` : ""}`]);
  bars(card.body, rows, largest);
  for (const [name, reason] of Object.entries(reasons)) {
    card.body.append(el("span", {}, name), el("span", { class: "hint" }, `not measured: ${reason}`), el("span", {}));
  }
  card.now.textContent = peak ? `peak ${(peak / 1e9).toFixed(2)} GB` : "";
}

/* Use of each core now, the mean of the run in the text; performance and efficiency cores apart. */
function showCores(card, cores, kinds) {
  const rows = cores.map(({ name, now, mean }) => [name, now ?? mean, `${Math.round(now ?? mean)}%, mean ${Math.round(mean)}%`]);
  bars(card.body, rows, 100);
  card.now.textContent = Object.entries(kinds).map(([kind, mean]) => `${kind === "core" ? "all cores" : `${kind} cores`}: mean ${Math.round(mean)}%`).join(", ");
}

function showSplit(body, now, seconds, note = "") {
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
  body.replaceChildren(bar, legend, ...(note ? [el("p", { class: "hint" }, `From ${note}.`)] : []));
  now.textContent = total < 0.1 ? `${(1000 * total).toFixed(1)} ms per step` : `${total.toFixed(2)} s per step`;
}
