"use strict";
/* The page of runs: its state, the updates from the server, and what is drawn where. */
const RECALL = "text_to_image/recall@1", BACK = "image_to_text/recall@1";
const UPDATE_MS = 1000;
const MAX_POINTS = 6000;
const state = {
  runs: [], // what the server says about each run
  data: {}, // run -> { steps: one column per figure, evaluations, analyses of steps }
  cursors: {}, // run -> which rows the page already has
  focus: null, shown: new Set(), // the run in focus, and all runs in the plots
  paused: false, smooth: 0, log: false, axis: "step",
  snapshots: [], snapshot: null, // steps that have examples, and which of them is shown
};
const runOf = (id) => state.runs.find((run) => run.id === id);
const order = (id) => Math.max(0, state.runs.findIndex((run) => run.id === id));
const isNumber = (value) => typeof value === "number";

/* plots ------------------------------------------------------------------------------------------------------- */
const plots = {}, cards = {};
function addPlot(box, id, title, none) {
  plots[id] = new Plot(title, { id, none });
  $(box).append(plots[id].figure);
}
function addCard(box, id, title) {
  cards[id] = card(title, id);
  $(box).append(cards[id].figure);
}

/* STEP_FIELDS of fields.js: the fields of the steps with a plot, the loss first; from the table in runlog.py */
const CURVES = STEP_FIELDS.filter((field) => !field.about_machine);
const MACHINE_CURVES = STEP_FIELDS.filter((field) => field.about_machine);
const SENSORS = ["watts", "celsius", "fan_rpm", "battery_percent"]; // not every machine has them
const AFTER_EVALUATION = "waiting for the first evaluation";
addPlot("plots", CURVES[0].name, CURVES[0].title);
addPlot("plots", "best", "Mean recall, %", AFTER_EVALUATION);
addPlot("plots", "recall", "Recall@1, %", AFTER_EVALUATION);
for (const field of CURVES.slice(1)) addPlot("plots", field.name, field.title);
/* ANALYSES of fields.js: from the table in analyses.py; those with the same title share a plot */
const BY_TITLE = Map.groupBy(ANALYSES, (analysis) => analysis.title);
for (const [title, [first]] of BY_TITLE) {
  if (first.shown_as === "heat map") addCard("analysis", first.name, title);
  else addPlot("analysis", first.name, title, AFTER_EVALUATION);
}
const NOT_COMPARABLE = "Accuracies are within a batch of B images: their chance level is 1/B, so they cannot be compared between batch sizes. Recall is over the complete validation split.";
const TABLES = { epochs: ["By epoch", NOT_COMPARABLE], phases: ["Phases of the loss", "Straight lines that describe the loss best, with their slope."] };
for (const [name, [title]] of Object.entries(TABLES)) addCard("tables", name, title);
addCard("machine", "split", "Step time by stage");
addCard("machine", "parts", "Memory by component");
addCard("machine", "cores", "Use of each core");
addCard("machine", "energy", "Energy");
addCard("machine", "heat", "Temperature, throttling, fan");
for (const field of MACHINE_CURVES) addPlot("machine", field.name, field.title);

function xs(data) {
  if (state.axis === "step") return data.steps.step || [];
  return (data.steps.elapsed || []).map((seconds) => (isNumber(seconds) ? seconds / 60 : null));
}
/* An evaluation is drawn at the training time of its step. */
function evaluationX(data, row) {
  if (state.axis === "step") return row.step;
  const at = (data.steps.step || []).findIndex((step) => step >= row.step), spent = data.steps.elapsed || [];
  return (spent[at < 0 ? spent.length - 1 : at] || 0) / 60;
}
function curve(id, column, factor) {
  const data = state.data[id], x = xs(data), y = data.steps[column] || [];
  const known = x.map((_, i) => i).filter((i) => isNumber(x[i]) && isNumber(y[i]));
  const values = smooth(known.map((i) => y[i] * factor), state.smooth);
  return { name: runOf(id).name, index: order(id), x: known.map((i) => x[i]), y: values };
}
function evaluations(id, pick, extra = {}) {
  const data = state.data[id];
  const rows = data.evaluations.map((row) => [evaluationX(data, row), pick(row)]).filter(([, v]) => Number.isFinite(v));
  const points = { x: rows.map((row) => row[0]), y: rows.map((row) => row[1]), dots: true };
  return { name: runOf(id).name, index: order(id), ...points, ...extra };
}

function drawPlots() {
  const ids = [...state.shown].filter((id) => state.data[id] && runOf(id));
  ids.sort((a, b) => (a === state.focus ? -1 : b === state.focus ? 1 : order(a) - order(b)));
  const ends = ids.map((id) => xs(state.data[id]).filter(isNumber).pop()).filter(isNumber);
  Zoom.whole = ends.length ? [0, Math.max(...ends)] : null;
  const dashed = { name: "chance", color: css("--soft"), dash: [3, 4], thin: true, dots: false };
  for (const { name, factor, unit, chance } of STEP_FIELDS) {
    const lines = ids.map((id) => curve(id, name, factor));
    if (chance && ids.length === 1) lines.push({ ...curve(ids[0], chance, factor), ...dashed });
    plots[name].set(lines, { log: name === "loss" && state.log, unit });
  }
  let recall = ids.map((id) => evaluations(id, (row) => row[RECALL] * 100));
  if (ids.length === 1) {
    const [id] = ids;
    recall = [
      evaluations(id, (row) => row[RECALL] * 100, { name: "text to image" }),
      evaluations(id, (row) => row[BACK] * 100, { name: "image to text", index: order(id) + 1 }),
      evaluations(id, (row) => row[`${RECALL}/chance`] * 100, dashed),
    ];
  }
  plots.recall.set(recall, { unit: "%" });
  const metrics = [...new Set(ids.map((id) => runOf(id).metric))].join(" or ") || "mean recall";
  plots.best.rename(`${metrics[0].toUpperCase()}${metrics.slice(1)}, %`);
  const best = ids.map((id) => evaluations(id, (row) => row[runOf(id).metric_name] * 100));
  if (ids.length === 1) best.push(evaluations(ids[0], (row) => row[`${runOf(ids[0]).metric_name}/chance`] * 100, dashed));
  plots.best.set(best, { unit: "%" });
  for (const name of SENSORS) plots[name].figure.hidden = !plots[name].series.length;
  if (ids.includes(state.focus)) drawAnalysis(state.focus);
}

function drawAnalysis(id) {
  for (const [name, [, words]] of Object.entries(TABLES)) showTable(cards[name], state.data[id].tables?.[name], words);
  for (const group of BY_TITLE.values()) {
    const [first] = group;
    if (first.shown_as === "heat map") showHeatMap(cards[first.name], first, analysisRows(id, first));
    else plots[first.name].set(group.flatMap((each) => analysisCurves(id, each)).map((line, index) => ({ ...line, index })), { unit: first.unit });
  }
}
const valueAt = (row, path) => path.split("/").reduce((value, part) => value?.[part], row);
function analysisRows(id, analysis) {
  const data = state.data[id], rows = analysis.record_kind === "eval" ? data.evaluations : data.analyses;
  return rows.map((row) => ({ step: row.step, value: valueAt(row, analysis.path) })).filter((row) => row.value !== undefined && row.value !== null);
}
/* The curves of an analysis: of its number, or of each part of its value; of a rate its value, and the chance level. */
function analysisCurves(id, analysis) {
  const rows = analysisRows(id, analysis);
  const parts = analysis.shown_as === "curves" ? [...new Set(rows.flatMap((row) => Object.keys(row.value)))] : [null];
  const line = (pick, extra) => {
    const points = rows.map((row) => [evaluationX(state.data[id], row), analysis.factor * pick(row)]).filter(([, y]) => Number.isFinite(y));
    return { x: points.map(([x]) => x), y: points.map(([, y]) => y), dots: true, ...extra };
  };
  const lines = parts.map((part, index) => {
    const pick = (row) => { const value = part === null ? row.value : row.value[part]; return value?.value ?? value; };
    return line(pick, { name: part ?? analysis.label, index });
  });
  const chance = (row) => Math.min(...Object.values(row.value).map((rate) => rate.chance));
  if (analysis.has_rates && rows.length) lines.push(line(chance, { name: "chance", color: css("--soft"), dash: [3, 4], thin: true, dots: false }));
  return lines;
}

/* head -------------------------------------------------------------------------------------------------------- */
function clock(seconds) {
  const s = Math.max(0, Math.round(seconds)), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return (h ? `${h}:${String(m).padStart(2, "0")}` : `${m}`) + `:${String(s % 60).padStart(2, "0")}`;
}
function figure(name, value, words, small = "") {
  const text = isNumber(value) ? words(value) : value ?? "-"; // the log writes NaN as text
  return el("div", {}, el("dt", {}, name), el("dd", {}, text, ...(small ? [el("small", {}, small)] : [])));
}
function progressText(run) {
  let words = run.message;
  if (run.steps) words = `step ${count(run.step)} of ${count(run.steps)}, ${Math.floor(100 * run.step / run.steps)}%`;
  if (isNumber(run.seconds_left)) {
    const end = new Date(Date.now() + 1000 * run.seconds_left);
    const until = end.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    words += ` · ${clock(run.seconds_left)} left, until ${until}`;
  }
  return run.seconds ? `${words} · ${clock(run.seconds)} trained` : words;
}
function figures(run) {
  const last = run.last, found = state.data[run.id]?.evaluations || [], newest = found[found.length - 1] || {};
  const [value, low, high, chance] = ["", "/low", "/high", "/chance"].map((part) => newest[run.metric_name + part]);
  const interval = isNumber(low) ? `${percent(low)} to ${percent(high)}, chance ${percent(chance, 2)}` : "";
  const cells = [figure("loss", last.loss, short)];
  if (isNumber(value)) cells.push(figure(run.metric, value, percent, interval));
  if (isNumber(run.best)) cells.push(figure("best", run.best, percent, `${run.metric} at step ${count(run.best_step)}`));
  return [
    ...cells,
    figure("speed", last.images_per_second, (v) => count(Math.round(v)), "images per second"),
    figure("temperature", last.temperature, short), figure("learning rate", last.lr, short),
    figure("gradient norm", last.grad_norm, short),
    figure("memory", last.memory_bytes, (v) => `${(v / 1e9).toFixed(2)} GB`),
    figure("epoch", last.epoch, (v) => v.toFixed(2)),
  ];
}
function drawHead() {
  const run = runOf(state.focus);
  $("empty").hidden = Boolean(run); $("run").hidden = !run;
  if (!run) return;
  const done = run.steps ? Math.floor(100 * run.step / run.steps) : 0;
  document.title = `${run.steps ? `${done}% ` : ""}${run.name} · m1clip`;
  $("run-name").textContent = run.name; $("path").textContent = run.run;
  $("state").textContent = run.state; $("state").className = `badge ${run.state}`;
  $("bar").style.width = `${done}%`;
  $("progress").setAttribute("aria-valuenow", String(done));
  $("progress-text").textContent = progressText(run);
  $("figures").replaceChildren(...figures(run));
  const diagnostics = run.diagnostics.map(([level, text]) => el("li", { class: level }, text));
  const same = $("diagnostics").textContent === diagnostics.map((each) => each.textContent).join("");
  if (!same) $("diagnostics").replaceChildren(...diagnostics); // a screen reader reads every replacement
  $("events").replaceChildren(...run.events.map(([time, text]) =>
    el("tr", {}, el("td", {}, time ? new Date(1000 * time).toLocaleTimeString() : ""), el("td", {}, text))));
  const use = run.resources;
  showSplit(cards.split.body, cards.split.now, use.stages, use.stage_note);
  showMemory(cards.parts, use.memory, run.memory.peak, use.memory_reasons);
  showCores(cards.cores, use.cores, use.core_kinds);
  facts(cards.energy.body, use.energy);
  facts(cards.heat.body, use.heat);
}

function drawRuns() {
  const old = new Map([...$("runs").children].map((li) => [li.dataset.id, li]));
  state.runs.forEach((run, i) => {
    const li = old.get(run.id) || addRun(run.id), [box, swatch, button] = li.children;
    old.delete(run.id);
    const chance = run.chance ? ` (chance ${percent(run.chance, 2)})` : "";
    const best = isNumber(run.best) ? `, ${run.metric} ${percent(run.best)}${chance}` : "";
    const done = run.steps ? ` ${Math.floor(100 * run.step / run.steps)}%` : "";
    box.checked = state.shown.has(run.id);
    box.setAttribute("aria-label", `Show ${run.name} in the plots`);
    swatch.style.background = color(i);
    button.title = run.run;
    button.children[0].textContent = run.name;
    button.children[1].textContent = `${run.state}${done}${best}`;
    button.setAttribute("aria-current", String(run.id === state.focus));
    li.className = run.id === state.focus ? "current" : "";
  });
  for (const li of old.values()) li.remove();
}
function addRun(id) {
  const box = el("input", { type: "checkbox" });
  const button = el("button", { type: "button" }, el("span", { class: "name" }), el("span", { class: "small" }));
  const li = el("li", {}, box, el("span", { class: "swatch", "aria-hidden": "true" }), button);
  li.dataset.id = id;
  box.addEventListener("change", () => toggle(id, box.checked));
  button.addEventListener("click", () => focus(id));
  $("runs").append(li);
  return li;
}

/* examples ---------------------------------------------------------------------------------------------------- */
/* The slider follows the newest snapshot unless the user has moved it. */
async function loadSnapshots() {
  const steps = runOf(state.focus)?.snapshots || [], before = state.snapshots;
  $("no-snapshots").hidden = steps.length > 0;
  $("found").hidden = $("snapshot-controls").hidden = steps.length === 0;
  if (!steps.length || (state.snapshot !== null && String(steps) === String(before))) return;
  const newest = state.snapshot === null || state.snapshot === before.length - 1;
  state.snapshots = steps;
  $("snapshot").max = String(steps.length - 1);
  await showSnapshot(newest ? steps.length - 1 : Math.min(state.snapshot, steps.length - 1));
}
async function showSnapshot(index) {
  state.snapshot = index;
  const id = state.focus, answer = await fetch(`/api/snapshot?run=${id}&index=${state.snapshots[index]}`);
  if (!answer.ok || id !== state.focus) return;
  const snapshot = await answer.json();
  const words = `step ${count(snapshot.step)}, ${index + 1} of ${state.snapshots.length}`;
  $("snapshot").value = String(index);
  $("snapshot").setAttribute("aria-valuetext", words);
  $("snapshot-text").textContent = words;
  showQueries($("queries"), id, snapshot);
  showConfusions($("confusions"), id, snapshot);
  showMatrix($("matrix"), $("matrix-text"), snapshot);
}

/* updates ----------------------------------------------------------------------------------------------------- */
let pending = false;
function draw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; drawRuns(); drawHead(); drawPlots(); });
}
function link(kind, words) {
  $("link").className = `link ${kind}`;
  if ($("link-text").textContent !== words) $("link-text").textContent = words;
}
async function update() {
  if (state.paused) return;
  const query = new URLSearchParams([...state.shown].map((id) => [id, state.cursors[id] || "new"]));
  const answer = await fetch(`/api/update?${query}`).catch(() => null);
  if (!answer?.ok) { link("lost", "connection lost, reconnecting"); return; }
  const { runs, rows, search } = await answer.json();
  $("pages").hidden = !search;
  if (state.paused) return;
  link("live", "live");
  for (const each of rows) takeRows(each);
  takeRuns(runs);
}
/* One request at a time: two would bring the same rows twice. */
let last = Promise.resolve();
function updateNow() { return (last = last.then(update).catch(console.error)); }
async function follow() { await updateNow(); setTimeout(follow, UPDATE_MS); }

function takeRuns(runs) {
  state.runs = runs;
  if (!runOf(state.focus)) {
    const wanted = new URLSearchParams(location.hash.slice(1)).get("run");
    const run = runOf(wanted) || runs.find((each) => each.state === "running") || runs[runs.length - 1];
    if (run) { focus(run.id); return; }
  }
  draw();
  loadSnapshots();
}
const halve = (list) => list.filter((_, i) => i % 2 === 0);
function takeRows({ id, cursor, reset, steps, evaluations: evaluated, analyses, tables }) {
  state.cursors[id] = cursor;
  if (reset || !state.data[id]) state.data[id] = { steps: {}, evaluations: [], analyses: [] };
  const data = state.data[id], columns = data.steps;
  for (const row of steps) {
    const length = (columns.step || []).length;
    for (const name of new Set([...Object.keys(columns), ...Object.keys(row)])) {
      columns[name] ||= new Array(length).fill(null);
      columns[name].push(isNumber(row[name]) ? row[name] : null);
    }
  }
  data.evaluations.push(...evaluated);
  data.analyses.push(...analyses);
  data.tables = tables || data.tables;
  if ((columns.step || []).length > MAX_POINTS) {
    for (const name of Object.keys(columns)) columns[name] = halve(columns[name]);
  }
}
function focus(id) {
  if (state.focus && state.shown.size <= 1) state.shown.clear();
  state.focus = id; state.shown.add(id); state.snapshot = null;
  location.hash = `run=${id}`;
  Zoom.range = null;
  updateNow(); draw(); loadSnapshots();
}
function toggle(id, on) {
  if (on) state.shown.add(id);
  else if (id !== state.focus) state.shown.delete(id);
  updateNow(); draw();
}
function pause() {
  state.paused = !state.paused;
  $("pause").setAttribute("aria-pressed", String(state.paused));
  $("pause").textContent = state.paused ? "Continue" : "Pause";
  if (state.paused) link("live", "paused"); else updateNow();
}

$("pause").addEventListener("click", pause);
$("reset").addEventListener("click", () => Zoom.reset());
$("axis").addEventListener("change", () => { state.axis = $("axis").value; Zoom.range = null; draw(); });
$("smooth").addEventListener("input", () => { state.smooth = Number($("smooth").value); draw(); });
$("log").addEventListener("change", () => { state.log = $("log").checked; draw(); });
$("snapshot").addEventListener("input", () => showSnapshot(Number($("snapshot").value)));
document.addEventListener("themechange", draw);
document.addEventListener("keydown", (event) => {
  if (typing(event)) return;
  if (event.key === "p") pause();
});
follow();
