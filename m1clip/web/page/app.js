"use strict";
/* State, the live stream, and what goes where. */
const $ = (id) => document.getElementById(id);
const RECALL = "text_to_image/recall@1", BACK = "image_to_text/recall@1";
const state = { runs: [], data: {}, focus: null, shown: new Set(), paused: false, smooth: 0, log: false, axis: "step", stream: null, steps: [], chosen: null };

/* theme ------------------------------------------------------------------------------------------------------- */
const THEMES = ["system", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");
let theme = localStorage.getItem("m1clip-theme") || "system";
function applyTheme() {
  document.documentElement.dataset.theme = theme === "system" ? (system.matches ? "dark" : "light") : theme;
  $("theme").textContent = `Theme: ${theme}`;
  draw();
}
function nextTheme() { theme = THEMES[(THEMES.indexOf(theme) + 1) % 3]; localStorage.setItem("m1clip-theme", theme); applyTheme(); }

/* plots ------------------------------------------------------------------------------------------------------- */
const CURVES = [
  ["loss", "Loss"], ["temperature", "Temperature"], ["lr", "Learning rate"], ["grad_norm", "Gradient norm"],
  ["images_per_second", "Images per second"], ["step_seconds", "Seconds per step"],
];
const FIRST_EVALUATION = { none: "after the first evaluation" };
const plots = {}, cards = {};
function addPlot(box, id, title, options = {}) { plots[id] = new Plot(title, { id, ...options }); $(box).append(plots[id].figure); }
function addCard(box, id, title) { cards[id] = card(title, id); $(box).append(cards[id].figure); }

addPlot("plots", "loss", "Loss");
addPlot("plots", "best", "Mean recall (class folders: top-1 accuracy), %", FIRST_EVALUATION);
addPlot("plots", "recall", "Recall@1, %", FIRST_EVALUATION);
for (const [id, title] of CURVES.slice(1)) addPlot("plots", id, title);
addPlot("plots", "waiting", "Loading data, % of a step");
addCard("analysis", "layers", "Gradients by layer");
addPlot("analysis", "difficulty", "Accuracy by similarity of the wrong caption, %", FIRST_EVALUATION);
addPlot("analysis", "negatives", "Accuracy against generated negatives, %", { none: "synthetic images only" });
addPlot("analysis", "geometry", "Alignment, uniformity, modality gap", FIRST_EVALUATION);
addCard("analysis", "groups", "Recall@1 by image content");
addCard("analysis", "lengths", "Recall@1 by caption length");
addCard("machine", "split", "Where the time of a step goes");
addPlot("machine", "phases", "Parts of a step, %", { none: "not measured on this device" });
addPlot("machine", "memory", "Memory, GB");
addCard("machine", "parts", "Memory by component");
addCard("machine", "cores", "Cores");
addPlot("machine", "power", "Power, watts", { none: "not measured on this machine" });
addPlot("machine", "heat", "Temperature of the machine, °C", { none: "not measured on this machine" });

function xs(data) {
  const step = data.steps.step || [];
  if (state.axis === "step") return step;
  const spent = data.steps.elapsed || [];
  return step.map((_, i) => (spent[i] === null || spent[i] === undefined ? null : spent[i] / 60));
}
/* an evaluation takes the training time of its step */
function evalX(data, row) {
  if (state.axis === "step") return row.step;
  const at = (data.steps.step || []).findIndex((step) => step >= row.step);
  const spent = data.steps.elapsed || [];
  return (spent[at < 0 ? spent.length - 1 : at] || 0) / 60;
}
function chosen() { return [...state.shown].filter((id) => state.data[id]).sort((a, b) => (a === state.focus ? -1 : b === state.focus ? 1 : order(a) - order(b))); }
function order(id) { return state.runs.findIndex((run) => run.id === id); }
function nameOf(id) { const run = state.runs.find((each) => each.id === id); return run ? run.name : id; }
function metric(id) { const run = state.runs.find((each) => each.id === id); return run ? run.metric : ["mean_recall", "mean recall"]; }
function curve(id, column, factor = 1, smoothing = state.smooth) {
  const data = state.data[id], x = xs(data), y = (data.steps[column] || []).map((v) => (v === null || v === undefined ? null : v * factor));
  const keep = x.map((v, i) => i).filter((i) => x[i] !== null && y[i] !== null && y[i] !== undefined);
  return { name: nameOf(id), index: Math.max(0, order(id)), x: keep.map((i) => x[i]), y: smooth(keep.map((i) => y[i]), smoothing) };
}
function evaluations(id, pick, extra = {}) {
  const data = state.data[id], rows = data.evaluations.map((row) => [evalX(data, row), pick(row)]).filter(([, v]) => Number.isFinite(v));
  return { name: nameOf(id), index: Math.max(0, order(id)), x: rows.map((r) => r[0]), y: rows.map((r) => r[1]), dots: true, ...extra };
}
const deep = (row, ...path) => path.reduce((value, key) => (value === undefined || value === null ? undefined : value[key]), row);

function drawPlots() {
  const ids = chosen(), id = state.focus, single = ids.length === 1;
  const ends = ids.map((each) => xs(state.data[each]).filter((v) => v !== null).pop()).filter((v) => v !== undefined);
  Zoom.whole = ends.length ? [0, Math.max(...ends)] : null;
  for (const [column] of CURVES) plots[column].set(ids.map((each) => curve(each, column)), { log: column === "loss" && state.log });
  let recall = ids.map((each) => evaluations(each, (row) => row[RECALL] * 100));
  if (single && state.data[id]) {
    recall = [evaluations(id, (row) => row[RECALL] * 100, { name: "text to image" }), evaluations(id, (row) => row[BACK] * 100, { name: "image to text", index: order(id) + 1 }),
      evaluations(id, (row) => row[RECALL + "/chance"] * 100, { name: "chance", color: css("--soft"), dash: [3, 4], thin: true, dots: false })];
  }
  plots.recall.set(recall, { unit: "%" });
  plots.best.set(ids.map((each) => evaluations(each, (row) => row[metric(each)[0]] * 100)), { unit: "%" });
  plots.waiting.set(ids.map((each) => curve(each, "data_fraction", 100)), { unit: "%" });
  plots.memory.set(ids.map((each) => curve(each, "memory_bytes", 1e-9, 0)), { unit: " GB" });
  plots.power.set(ids.map((each) => curve(each, "watts")), { unit: " W" });
  plots.heat.set(ids.map((each) => curve(each, "celsius", 1, 0)), { unit: " °C" });
  for (const name of ["power", "heat"]) plots[name].figure.hidden = !plots[name].series.length;
  const missing = [["power", "power"], ["heat", "temperature"]].filter(([name]) => !plots[name].series.length).map(([, word]) => word);
  $("unmeasured").textContent = missing.length ? `Not measured on this machine: ${missing.join(", ")}.` : "";
  if (id && state.data[id]) drawFocus(id);
}

function drawFocus(id) {
  const data = state.data[id], last = data.evaluations[data.evaluations.length - 1], fraction = (...path) => (row) => { const v = deep(row, "analysis", ...path, 0); return typeof v === "number" ? 100 * v : undefined; };
  const three = (group) => ["easy", "medium", "hard"].map((name, i) => evaluations(id, fraction(group, name), { name, index: i }));
  plots.difficulty.set(three("difficulty"), { unit: "%" });
  plots.negatives.set(three("negatives"), { unit: "%" });
  plots.geometry.set([["alignment", "alignment"], ["uniformity_image", "uniformity of images"], ["uniformity_text", "uniformity of captions"], ["modality_gap", "modality gap"]]
    .map(([key, name], i) => evaluations(id, (row) => deep(row, "analysis", key), { name, index: i })));
  const phases = PHASES.filter((name) => data.steps["seconds/" + name]);
  const total = (i) => phases.reduce((sum, name) => sum + (data.steps["seconds/" + name][i] || 0), 0);
  plots.phases.set(phases.map((name) => { const y = data.steps["seconds/" + name].map((v, i) => (total(i) ? 100 * (v || 0) / total(i) : null)); return { name, index: 0, color: PHASE_COLORS[name], x: xs(data), y: smooth(y, state.smooth) }; }), { unit: "%" });
  const layers = data.layers.filter((row) => row.layers);
  if (layers.length) { showLayers(cards.layers.body, layers); cards.layers.now.textContent = `step ${layers[layers.length - 1].step.toLocaleString("en")}`; }
  else cards.layers.body.replaceChildren(el("p", { class: "hint" }, "not measured yet"));
  const groups = deep(last, "analysis", "groups"), rows = [];
  if (groups) {
    const heads = {};
    for (const [name, value] of Object.entries(groups)) { const [head, word] = name.split("/"); (heads[head] = heads[head] || []).push([word, value]); }
    for (const [head, found] of Object.entries(heads)) { rows.push([head, null]); for (const [word, [value, n]] of found.sort((a, b) => a[1][0] - b[1][0])) rows.push([word, value, `${percent(value, 0)} of ${n}`]); }
  }
  if (rows.length) bars(cards.groups.body, rows); else cards.groups.body.replaceChildren(el("p", { class: "hint" }, "needs labels, which synthetic images have"));
  const lengths = deep(last, "analysis", "length");
  if (lengths) bars(cards.lengths.body, Object.entries(lengths).map(([name, [value, n]]) => [name, value, `${percent(value)} of ${n}`]));
}

/* head -------------------------------------------------------------------------------------------------------- */
function clock(seconds) {
  if (seconds === null || seconds === undefined) return "?";
  const s = Math.max(0, Math.round(seconds)), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return (h ? `${h}:${String(m).padStart(2, "0")}` : `${m}`) + `:${String(s % 60).padStart(2, "0")}`;
}
function figure(name, value, small = "") { return el("div", {}, el("dt", {}, name), el("dd", {}, value, ...(small ? [el("small", {}, small)] : []))); }
const num = (value, words) => (typeof value === "number" ? words(value) : value === undefined || value === null ? "-" : String(value));

function drawHead() {
  const run = state.runs.find((each) => each.id === state.focus);
  $("empty").hidden = Boolean(run); $("run").hidden = !run;
  if (!run) return;
  document.title = `${run.steps ? Math.round(100 * run.step / run.steps) + "% " : ""}${run.name} · m1clip`;
  $("run-name").textContent = run.name; $("path").textContent = run.path;
  $("state").textContent = run.state; $("state").className = `badge ${run.state}`;
  const done = run.steps ? 100 * run.step / run.steps : 0;
  $("bar").style.width = `${done}%`;
  $("progress").setAttribute("aria-valuenow", String(Math.round(done)));
  let words = run.steps ? `step ${run.step.toLocaleString("en")} of ${run.steps.toLocaleString("en")}, ${done.toFixed(0)}%` : run.message;
  if (run.seconds_left !== null) words += ` · ${clock(run.seconds_left)} left, until ${new Date(Date.now() + 1000 * run.seconds_left).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })}`;
  if (run.elapsed) words += ` · ${clock(run.elapsed)} trained`;
  $("progress-text").textContent = words;
  const last = run.last || {}, data = state.data[run.id], test = data && data.evaluations[data.evaluations.length - 1];
  const cells = [figure("loss", num(last.loss, short))];
  const [name, label] = run.metric;
  if (test && typeof test[name] === "number") cells.push(figure(label, percent(test[name]), typeof test[name + "/low"] === "number" ? `${percent(test[name + "/low"])} to ${percent(test[name + "/high"])}, chance ${percent(test[name + "/chance"], 2)}` : ""));
  if (typeof run.best.value === "number") cells.push(figure("best", percent(run.best.value), `${label} at step ${run.best.step.toLocaleString("en")}`));
  cells.push(figure("speed", num(last.images_per_second, (v) => Math.round(v).toLocaleString("en")), "images per second"), figure("temperature", num(last.temperature, short)), figure("learning rate", num(last.lr, short)),
    figure("gradient norm", num(last.grad_norm, short)), figure("memory", num(last.memory_bytes, (v) => (v / 1e9).toFixed(2) + " GB")), figure("epoch", num(last.epoch, (v) => v.toFixed(2))));
  $("figures").replaceChildren(...cells);
  const diagnostics = run.diagnostics.map(([level, text]) => el("li", { class: level }, text));
  if ($("diagnostics").textContent !== diagnostics.map((d) => d.textContent).join("")) $("diagnostics").replaceChildren(...diagnostics);
  $("events").replaceChildren(...run.events.map(([time, text]) => el("tr", {}, el("td", {}, time ? new Date(1000 * time).toLocaleTimeString() : ""), el("td", {}, text))));
  if (last.seconds) showSplit(cards.split.body, cards.split.now, last.seconds);
  if (last.cores) bars(cards.cores.body, last.cores.map((value, i) => [`core ${i + 1}`, value / 100, `${value}%`]));
  const parts = Object.entries(run.memory || {}).filter(([name, value]) => name !== "peak" && typeof value === "number" && value > 0);
  if (parts.length) { bars(cards.parts.body, parts.map(([name, value]) => [name, value, `${(value / 1e6).toFixed(0)} MB`]), Math.max(...parts.map((p) => p[1]))); cards.parts.now.textContent = run.memory.peak ? `peak ${(run.memory.peak / 1e9).toFixed(2)} GB` : ""; }
}

function drawRuns() {
  const old = new Map([...$("runs").children].map((li) => [li.dataset.id, li]));
  state.runs.forEach((run, i) => {
    let li = old.get(run.id);
    if (!li) {
      const box = el("input", { type: "checkbox" }), swatch = el("span", { class: "swatch", "aria-hidden": "true" });
      const button = el("button", { type: "button" }, el("span", { class: "name" }), el("span", { class: "small" }));
      li = el("li", {}, box, swatch, button);
      li.dataset.id = run.id;
      box.addEventListener("change", () => toggle(run.id, box.checked));
      button.addEventListener("click", () => focus(run.id));
      $("runs").append(li);
    }
    old.delete(run.id);
    const [box, swatch, button] = li.children, best = typeof run.best.value === "number" ? `, ${run.metric[1]} ${percent(run.best.value)}` : "";
    box.checked = state.shown.has(run.id); box.setAttribute("aria-label", `Show ${run.name} in the plots`);
    swatch.style.background = color(i);
    button.children[0].textContent = run.name; button.title = run.path;
    button.children[1].textContent = `${run.state} ${run.steps ? Math.round(100 * run.step / run.steps) + "%" : ""}${best}`;
    button.setAttribute("aria-current", run.id === state.focus ? "true" : "false");
    li.className = run.id === state.focus ? "current" : "";
  });
  for (const li of old.values()) li.remove();
}

/* examples ---------------------------------------------------------------------------------------------------- */
/* the slider follows the newest snapshot unless the user has moved it */
async function loadSnapshots() {
  const run = state.runs.find((each) => each.id === state.focus), steps = run ? run.snapshots : [], known = state.steps;
  $("no-snapshots").hidden = steps.length > 0; $("found").hidden = $("snapshot-controls").hidden = steps.length === 0;
  if (!steps.length || (state.chosen !== null && String(steps) === String(known))) return;
  const follow = state.chosen === null || state.chosen === known.length - 1;
  state.steps = steps;
  $("snapshot").max = String(steps.length - 1);
  await showSnapshot(follow ? steps.length - 1 : Math.min(state.chosen, steps.length - 1));
}
async function showSnapshot(index) {
  state.chosen = index;
  const id = state.focus, answer = await fetch(`/api/snapshot?run=${id}&index=${state.steps[index]}`);
  if (!answer.ok || id !== state.focus) return;
  const snapshot = await answer.json();
  $("snapshot").value = String(index);
  const words = `step ${snapshot.step.toLocaleString("en")}, ${index + 1} of ${state.steps.length}`;
  $("snapshot-text").textContent = words; $("snapshot").setAttribute("aria-valuetext", words);
  showQueries($("queries"), id, snapshot); showConfusions($("confusions"), id, snapshot); showMatrix($("matrix"), $("matrix-text"), snapshot);
}
let playing = null;
function play() {
  if (playing) { clearInterval(playing); playing = null; $("play").textContent = "Play"; return; }
  let index = state.chosen === state.steps.length - 1 ? -1 : state.chosen;
  $("play").textContent = "Stop";
  playing = setInterval(() => { index += 1; if (index >= state.steps.length) { play(); return; } showSnapshot(index); }, 900);
}

/* live -------------------------------------------------------------------------------------------------------- */
let pending = false;
function draw() { if (pending) return; pending = true; requestAnimationFrame(() => { pending = false; drawRuns(); drawHead(); drawPlots(); }); }
function link(kind, words) { $("link").className = `link ${kind}`; if ($("link-text").textContent !== words) $("link-text").textContent = words; }

function connect() {
  if (state.stream) state.stream.close();
  const stream = new EventSource(`/api/live?runs=${[...state.shown].join(",")}`);
  state.stream = stream;
  stream.addEventListener("runs", (event) => { link("live", state.paused ? "paused" : "live"); takeRuns(JSON.parse(event.data)); });
  stream.addEventListener("rows", (event) => { if (state.paused) return; takeRows(JSON.parse(event.data)); });
  stream.onerror = () => { link("lost", "connection lost, reconnecting"); if (stream.readyState === EventSource.CLOSED && stream === state.stream) setTimeout(connect, 2000); };
}
function takeRuns(runs) {
  if (state.paused) return;
  state.runs = runs;
  if (!runs.some((run) => run.id === state.focus)) {
    const wanted = new URLSearchParams(location.hash.slice(1)).get("run");
    const best = runs.find((run) => run.id === wanted) || runs.find((run) => run.state === "running") || runs[runs.length - 1];
    if (best) { focus(best.id); return; }
  }
  draw(); loadSnapshots();
}
const MAX_POINTS = { steps: 6000, layers: 300 };
function halve(list) { return list.filter((_, i) => i % 2 === 0); }
/* rows: dicts of figures; steps are kept as one column per figure, the form that plots take */
function takeRows({ id, reset, steps, evaluations, layers }) {
  if (reset || !state.data[id]) state.data[id] = { steps: {}, evaluations: [], layers: [] };
  const data = state.data[id], columns = data.steps;
  for (const row of steps) {
    const length = (columns.step || []).length;
    for (const name of new Set([...Object.keys(columns), ...Object.keys(row)])) {
      const column = columns[name] || (columns[name] = new Array(length).fill(null));
      column.push(typeof row[name] === "number" ? row[name] : null);
    }
  }
  data.evaluations.push(...evaluations);
  data.layers.push(...layers);
  if (columns.step && columns.step.length > MAX_POINTS.steps) for (const name of Object.keys(columns)) columns[name] = halve(columns[name]);
  if (data.layers.length > MAX_POINTS.layers) data.layers = halve(data.layers);
  draw();
}
function focus(id) {
  if (state.focus && state.shown.size <= 1) state.shown.clear();
  state.focus = id; state.shown.add(id); state.chosen = null;
  location.hash = `run=${id}`;
  Zoom.range = null;
  connect(); draw(); loadSnapshots();
}
function toggle(id, on) {
  if (on) state.shown.add(id);
  else if (id !== state.focus) state.shown.delete(id);
  connect(); draw();
}
function pause() { state.paused = !state.paused; $("pause").setAttribute("aria-pressed", String(state.paused)); $("pause").textContent = state.paused ? "Continue" : "Pause"; if (!state.paused) connect(); else link("live", "paused"); }

$("theme").addEventListener("click", nextTheme);
$("pause").addEventListener("click", pause);
$("reset").addEventListener("click", () => Zoom.reset());
$("axis").addEventListener("change", () => { state.axis = $("axis").value; Zoom.range = null; draw(); });
$("smooth").addEventListener("input", () => { state.smooth = Number($("smooth").value); draw(); });
$("log").addEventListener("change", () => { state.log = $("log").checked; draw(); });
$("snapshot").addEventListener("input", () => showSnapshot(Number($("snapshot").value)));
$("play").addEventListener("click", play);
system.addEventListener("change", applyTheme);
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "p") pause();
  if (event.key === "t") nextTheme();
});
applyTheme();
connect();
