"use strict";
/* The Train button of the Label page: the run, its curves, what it gained, and the switch to its model. */
const TRAIN_MS = 1500, ENOUGH = 20, // validation photos, below which a recall tells little
  LOSS = "loss", ACTIVE = ["starting", "preparing", "running"];
const RECALLS = { "mean_recall": "mean recall", "text_to_image/recall@1": "first result is the photo", "text_to_image/recall@10": "photo is among the first 10" };
const run = { key: "", cursor: "new", steps: [], evaluations: [], status: null, found: null, rejected: "" };
const lossPlot = new Plot("Loss", { id: "loss" }), recallPlot = new Plot("Mean recall on validation labels, %", { id: "recall", none: "waiting for the first evaluation" });
$("plots").append(lossPlot.figure, recallPlot.figure);

const points = (value) => `${value >= 0 ? "+" : "−"}${Math.abs(100 * value).toFixed(1)}`;
const rate = ([value, low, high]) => `${(100 * value).toFixed(1)}% [${(100 * low).toFixed(1)}, ${(100 * high).toFixed(1)}]`;

async function curves(key) {
  if (key !== run.key) Object.assign(run, { key, cursor: "new", steps: [], evaluations: [] });
  const answer = await ask(`/api/update?${new URLSearchParams({ [key]: run.cursor })}`);
  if (answer.error) return null;
  for (const rows of answer.rows) {
    if (rows.reset) Object.assign(run, { steps: [], evaluations: [] });
    run.cursor = rows.cursor;
    run.steps.push(...rows.steps.map((row) => [row.step, row.loss]).filter(([, y]) => Number.isFinite(y)));
    run.evaluations.push(...rows.evaluations.map((row) => [row.step, 100 * row.mean_recall]).filter(([, y]) => Number.isFinite(y)));
    if (rows.evaluations.length) showValidation(rows.evaluations[rows.evaluations.length - 1]);
  }
  const found = answer.runs.find((each) => each.id === key);
  Zoom.whole = found?.steps ? [0, found.steps] : null;
  const line = (rows, dots) => [{ name: LOSS, index: 0, x: rows.map(([x]) => x), y: rows.map(([, y]) => y), dots }];
  lossPlot.set(line(run.steps, false));
  recallPlot.set(line(run.evaluations, true), { unit: "%" });
  return found;
}
/* How much the curve of recall can tell. */
function showValidation(row) {
  const images = row["mean_recall/n"], chance = row["mean_recall/chance"];
  if (!Number.isFinite(images) || !Number.isFinite(chance)) return;
  const few = images < ENOUGH ? ": too few to judge the model by" : "";
  $("recall-note").textContent = `Recall is measured on ${plural(images, "validation photo")}${few}. Chance level: ${(100 * chance).toFixed(1)}%.`;
}
/* The state for the badge: a run is not done before its model was compared. */
function phase({ work, state: is, result, problem: compared }) {
  return work === "comparing" || (is === "finished" && !result && !compared) ? "comparing" : is;
}
/* What is going on, in words. */
function words(status, found) {
  const { work, state: is, message, labels, name, in_use: inUse, progress } = status;
  if (work === "starting") return "Starting the training…";
  if (work === "stopping") return "Stopping after this step…";
  if (phase(status) === "comparing") return "Comparing the model before and after on the labels that were held out…";
  if (work === "switching") {
    const done = progress ? ` ${count(progress[0])} of ${plural(progress[1], "photo")} done.` : "";
    return `Indexing the photos with the other model.${done} Search uses the current one until all are done.`;
  }
  const trained = `${name}, on ${plural(labels || 0, "label")}`;
  if (is === "preparing") return `${trained}: ${message}`;
  if (is === "running") return found?.steps ? `${trained}: step ${count(found.step)} of ${count(found.steps)}${found.seconds_left ? `, about ${Math.ceil(found.seconds_left)} s left` : ""}` : `${trained}: ${message}`;
  if (is === "finished") return `${trained}: finished.${inUse ? " Search uses this model." : ""}`;
  if (is === "stopped") return `${trained}: ${message}. Search was not changed.`;
  if (is === "crashed") return `${trained}: failed. Search was not changed, and no label is lost.`;
  return "";
}
function showResult({ result, name, before, in_use: inUse, can_go_back: canGoBack, state: is, work }) {
  const hidden = !result || is !== "finished";
  $("result").hidden = $("switch").hidden = hidden;
  $("back").hidden = !canGoBack || Boolean(work);
  $("back").className = "";
  if (hidden) return;
  const same = result.metrics.every((metric) => String(metric.before) === String(metric.after));
  const [value, low, high] = result.gain, { use_new: useNew, reason } = result.verdict;
  const gain = same ? "" : ` ${points(value)} points of recall@10 [${points(low)}, ${points(high)}].`;
  $("result-head").textContent = `${useNew ? `Use ${name}` : `Keep ${before}`}: ${reason}.${gain}`;
  $("result-rows").replaceChildren(...result.metrics.map((metric) => el("tr", {}, el("th", {}, RECALLS[metric.name] || metric.name), el("td", {}, rate(metric.before)), el("td", {}, rate(metric.after)))));
  $("result-text").textContent = `${plural(result.captions, "caption")} of ${plural(result.photos, "photo")} that the new model was not trained on, each searched among ${plural(result.candidates, "photo")}; 95% intervals. Before: ${before}.`;
  $("switch").hidden = inUse || same || Boolean(work);
  $("switch").className = useNew ? "main" : "";
  $("back").className = inUse && !useNew ? "main" : "";
  $("switch").textContent = useNew ? "Search with the new model" : "Search with the new model anyway";
}
/* Why there is no model, and what to do. */
function problem({ failure, problem: compared, state: is, message, output }) {
  if (run.rejected || failure || compared) return run.rejected || failure || compared;
  return is === "crashed" ? `${message} (its output is in ${output}). Train again starts a new run on the same labels.` : "";
}
function showStatus(status, found) {
  const busy = Boolean(status.work), active = ACTIVE.includes(status.state), needed = state.progress ? state.progress.needed : null; // null: not known yet
  const starting = status.state === "starting";
  $("train-state").hidden = status.state === "none";
  $("train-state").textContent = phase(status);
  $("train-state").className = `badge ${phase(status)}`;
  $("train-text").textContent = words(status, found) || (needed === null ? "Loading…" : needed ? `${plural(needed, "more label")} needed before the first training.` : "A run in the background, of about a minute. You can go on labelling, or close the page.");
  if (needed && status.state !== "none" && !active && !busy) $("train-text").textContent += ` ${plural(needed, "more label")} needed to train again.`;
  $("train-error").textContent = problem(status);
  const equal = state.progress?.equal;
  $("train-warning").textContent = equal ? `${plural(equal.photos, "photo")} of ${count(state.progress.labelled)} have the same caption, “${equal.caption}”: from these a model learns little. Press l to correct them.` : "";
  $("train-start").disabled = busy || active || needed !== 0;
  $("train-start").textContent = status.state === "none" || status.state === "starting" ? "Train" : "Train again";
  $("train-start").hidden = active && !starting;
  $("train-stop").hidden = !active || starting;
  $("train-stop").disabled = $("switch").disabled = $("back").disabled = busy;
  $("train-run").hidden = status.state === "none" || !run.steps.length;
  const part = status.state === "finished" ? 100 : found?.steps ? (100 * found.step) / found.steps : 0;
  $("train-bar").style.width = `${part}%`;
  $("train-progress").setAttribute("aria-valuenow", String(Math.round(part)));
  showResult(status);
}
let timer = 0, asking = null, commands = 0; // begun or answered: a status from before the last one is out of date
async function poll() {
  const before = commands, status = await ask("/api/train");
  const found = status.run ? await curves(status.run) : null;
  if (before !== commands) return;
  if (status.error) { $("train-text").textContent = status.error; return; }
  Object.assign(run, { status, found });
  showStatus(status, found);
}
function followTraining() {
  clearTimeout(timer);
  asking ??= poll().finally(() => { asking = null; timer = setTimeout(followTraining, TRAIN_MS); });
  return asking;
}
async function command(name) {
  commands += 1;
  run.rejected = "";
  if (name === "start") {
    const status = { ...run.status, state: "starting", work: "starting", failure: "", problem: "" };
    Object.assign(run, { status, found: null });
    showStatus(status, null);
  }
  for (const id of ["train-start", "train-stop", "switch", "back"]) $(id).disabled = true;
  const answer = await send(`/api/train/${name}`, {});
  commands += 1;
  run.rejected = answer.error || "";
  await asking;
  await followTraining();
}
$("train-start").addEventListener("click", () => command("start"));
$("train-stop").addEventListener("click", () => command("stop"));
$("switch").addEventListener("click", () => command("switch"));
$("back").addEventListener("click", () => command("back"));
document.addEventListener("labels", () => { if (run.status) showStatus(run.status, run.found); });
document.addEventListener("themechange", () => { if (run.key) curves(run.key); });
followTraining();
