"use strict";
/* The Label page: the queue, the photo that is labelled, saving and undo. Names and words are only ever set as text. */
const PROGRESS_MS = 3000, FEW = 8; // photos left, below which more are asked for
const state = {
  token: "", page: Array.from(crypto.getRandomValues(new Uint32Array(3)), (n) => n.toString(36)).join(""),
  photos: [], at: 0, // what is listed, and the place of the large photo
  view: "next", // or "similar" or "labelled": what is listed
  waiting: [], // the next photos, while another view is shown
  chosen: new Set(), kept: [], selected: new Set(), // words and captions of the large photo; photos that are checked
  history: [], busy: false, loading: false, progress: null,
  digits: "", // a caption of digits alone, of which the page has asked whether it is meant
};
const current = () => state.photos[state.at];
const address = (photo, size) => `/photo${size}?id=${photo.id}&v=${photo.content}`;

/* requests ---------------------------------------------------------------------------------------------------- */
async function takeToken() {
  const library = await ask("/api/library");
  if (!library.error) state.token = library.token;
  link(library);
  return library;
}
/* A server that was started again has another token: it is fetched once, so that no label is lost. */
async function send(path, value) {
  for (const last of [false, true]) {
    const options = { method: "POST", body: JSON.stringify(value), headers: { "X-M1clip-Token": state.token } };
    const answer = await fetch(path, options).catch(() => null);
    if (answer?.status === 403 && !last) { await takeToken(); continue; }
    if (!answer) return { error: "The server does not answer. Is m1clip serve still running? Nothing is lost: try again." };
    return answer.json().catch(() => ({ error: `The server answered ${answer.status}. Try again.` }));
  }
  return { error: "The server does not accept labels. Try again." };
}
function link(library) {
  $("link").className = `link ${library.error ? "lost" : "live"}`;
  $("link-text").textContent = library.error ? (library.lost ? "connection lost" : "no index") : `${plural(library.images, "photo")} · ${library.model}`;
}

/* the queue --------------------------------------------------------------------------------------------------- */
async function fill() {
  if (state.loading) return;
  state.loading = true;
  const found = await ask(`/api/label/queue?page=${state.page}`);
  state.loading = false;
  if (found.error) { message("No photos to label yet", found.error); return; }
  $("message").hidden = true;
  showProgress(found);
  const list = state.view === "next" ? state.photos : state.waiting, known = new Set(list.map((photo) => photo.id));
  const before = list.length;
  list.push(...found.photos.filter((photo) => !known.has(photo.id)));
  if (state.view !== "next") return;
  if (before === 0) show(0); else draw();
  if (!list.length) message("All photos are labelled", "Each photo has a label, was skipped, or looks like one that has a label.");
}
async function list(view) {
  if (state.busy) return;
  const photo = current();
  if (view === state.view || view === "next") { back(); return; }
  if (view === "similar" && !photo) return;
  const found = await ask(view === "similar" ? `/api/label/similar?id=${photo.id}` : "/api/label/labelled");
  if (found.error) { $("error").textContent = found.error; return; }
  if (!found.photos.length) { $("note").textContent = view === "similar" ? "There is no similar photo without a label." : "No photo has a label yet."; return; }
  if (state.view === "next") state.waiting = state.photos;
  state.view = view;
  state.photos = view === "similar" ? [photo, ...found.photos] : found.photos;
  show(0);
}
function back() {
  if (state.view === "next") return;
  const done = new Set(state.photos.filter((photo) => photo.captions.length || photo.skipped).map((photo) => photo.id));
  state.view = "next";
  state.photos = state.waiting.filter((photo) => !done.has(photo.id));
  show(0);
  if (state.photos.length < FEW) fill();
}
const TITLES = { next: "Next photos", similar: "Similar photos", labelled: "Labelled last" };
function draw() {
  $("queue-head").textContent = TITLES[state.view];
  for (const view of ["similar", "labelled"]) $(view).setAttribute("aria-pressed", String(state.view === view));
  $("none").hidden = state.selected.size === 0;
  $("undo").disabled = state.history.length === 0;
  const old = new Map([...$("queue").children].map((tile) => [Number(tile.dataset.id), tile]));
  const tiles = state.photos.map((photo, place) => {
    const tile = old.get(photo.id) || addTile(photo);
    tile.className = `photo${place === state.at ? " current" : ""}${state.selected.has(photo.id) ? " selected" : ""}`;
    tile.querySelector("input").checked = state.selected.has(photo.id);
    return tile;
  });
  if (tiles.length !== old.size || tiles.some((tile, place) => tile !== $("queue").children[place])) $("queue").replaceChildren(...tiles);
  const targets = wanted().length;
  $("save").textContent = targets > 1 ? `Save for ${targets} photos` : "Save";
  const photo = current();
  for (const id of ["save", "skip", "similar"]) $(id).disabled = !photo;
  $("caption").disabled = !photo;
  $("all").disabled = !state.photos.length;
  $("labelled").disabled = state.progress === null;
}
function addTile(photo) {
  const button = el("button", { type: "button", "aria-label": `Label ${photo.path}` }, el("img", { src: address(photo, "/small"), alt: "", loading: "lazy" }));
  const box = el("input", { type: "checkbox", "aria-label": `Label together: ${photo.path}` });
  const tile = el("div", { class: "photo" }, button, box);
  tile.dataset.id = photo.id;
  button.querySelector("img").addEventListener("error", () => { button.parentElement.classList.add("lost"); });
  button.addEventListener("click", () => show(state.photos.findIndex((each) => each.id === photo.id)));
  box.addEventListener("change", () => select(photo.id, box.checked));
  return tile;
}
function select(id, on) {
  if (on) state.selected.add(id); else state.selected.delete(id);
  draw();
}

/* the large photo --------------------------------------------------------------------------------------------- */
const draft = (photo) => `m1clip-draft-${photo.path}`;
function show(place) {
  state.at = Math.max(0, Math.min(place, state.photos.length - 1));
  const photo = current();
  state.chosen = new Set();
  state.kept = photo ? [...photo.captions] : [];
  $("photo").className = "";
  if (photo) $("photo").src = address(photo, ""); else $("photo").removeAttribute("src");
  $("photo").alt = $("photo-name").textContent = photo ? photo.path : "";
  $("caption").value = photo ? sessionStorage.getItem(draft(photo)) || "" : "";
  $("error").textContent = state.digits = "";
  drawWords();
  draw();
}
function drawWords() {
  const photo = current();
  $("words").replaceChildren(...(photo?.suggestions || []).map((word, place) => {
    const button = el("button", { type: "button", "aria-pressed": String(state.chosen.has(word)) }, el("kbd", {}, String(place + 1)), word);
    button.addEventListener("click", () => toggle(word));
    return button;
  }));
  $("kept").replaceChildren(...state.kept.map((text) => {
    const remove = el("button", { type: "button", "aria-label": `Remove: ${text}` }, "×");
    remove.addEventListener("click", () => { state.kept = state.kept.filter((each) => each !== text); drawWords(); });
    return el("li", {}, text, remove);
  }));
}
function toggle(word) {
  if (state.chosen.has(word)) state.chosen.delete(word); else state.chosen.add(word);
  drawWords();
}
$("photo").addEventListener("error", () => {
  const photo = current();
  if (!photo) return;
  $("photo").className = "lost";
  $("note").textContent = `${photo.path} cannot be shown: was it deleted or renamed? Skip it, or index the folder again.`;
});

/* saving ------------------------------------------------------------------------------------------------------ */
/* The photos that get the label: the large one, and those that are checked. */
function wanted() {
  const photo = current();
  return photo ? [photo, ...state.photos.filter((each) => state.selected.has(each.id) && each.id !== photo.id)] : [];
}
function typed() {
  const text = $("caption").value.trim(), tags = [...state.chosen].join(", ");
  return [...state.kept, ...(text ? [text] : []), ...(tags ? [tags] : [])];
}
async function save(captions, skip = false) {
  const photo = current();
  if (!photo || state.busy) return;
  const changed = captions.join("\n") !== photo.captions.join("\n") || skip;
  if (!changed && (state.kept.length || !captions.length)) { $("error").textContent = "Write a caption or choose a word first; n skips the photo."; return; }
  const text = $("caption").value.trim();
  if (!skip && captions.includes(text) && isDigits(text) && state.digits !== text) {
    state.digits = text;
    $("error").textContent = `The caption is only “${text}”. To choose words by their digits, press esc first. To save “${text}” as the caption, press enter again.`;
    return;
  }
  const photos = skip ? [photo] : wanted();
  if (await change(photos.map((each) => ({ photo: each, captions, skip })), true)) advance(photos);
}
const isDigits = (text) => /^[\d\s.,;]*\d[\d\s.,;]*$/.test(text); // keys that were meant for words, more likely
/* One request; true if all of it was saved. What was there before is remembered, to undo it. */
async function change(changes, remember) {
  state.busy = true;
  const [{ captions, skip }] = changes;
  const photos = changes.map(({ photo }) => ({ id: photo.id, version: photo.version }));
  const before = changes.map(({ photo }) => ({ photo, captions: [...photo.captions], skip: photo.skipped }));
  const answer = await send("/api/label", { photos, captions, skip, page: state.page });
  state.busy = false;
  if (answer.error) { $("error").textContent = answer.error; return false; }
  const by = new Map(answer.photos.map((each) => [each.id, each]));
  for (const { photo } of changes) Object.assign(photo, { captions: by.get(photo.id).captions, skipped: by.get(photo.id).skipped, version: by.get(photo.id).version });
  const conflicts = changes.filter(({ photo }) => by.get(photo.id).conflict);
  if (remember) state.history.push(before.filter(({ photo }) => !by.get(photo.id).conflict));
  $("note").textContent = answer.note;
  showProgress(answer);
  for (const { photo } of changes) if (!by.get(photo.id).conflict) sessionStorage.removeItem(draft(photo));
  if (conflicts.length) {
    const { photo } = conflicts[0];
    const text = $("caption").value;
    show(state.photos.indexOf(photo));
    $("caption").value = text;
    $("error").textContent = `Another page has labelled ${photo.path} meanwhile: its label is shown. Save again to add yours.`;
    return false;
  }
  return true;
}
function advance(photos) {
  const done = new Set(photos.map((photo) => photo.id));
  $("caption").blur(); // the next key is meant for the next photo
  state.selected.clear();
  if (state.view === "labelled") { show(state.at + 1); return; }
  state.photos = state.photos.filter((photo) => !done.has(photo.id));
  state.waiting = state.waiting.filter((photo) => !done.has(photo.id));
  if (state.view === "similar" && !state.photos.length) { back(); return; }
  show(Math.min(state.at, state.photos.length - 1));
  if (state.photos.length < FEW && state.view === "next") fill();
}
async function undo() {
  const last = state.history.pop();
  if (!last || state.busy) return;
  for (const each of last) {
    if (!(await change([each], false))) return;
  }
  const photos = last.map(({ photo }) => photo), known = new Set(photos.map((photo) => photo.id));
  if (state.view !== "next") back();
  state.photos = [...photos, ...state.photos.filter((photo) => !known.has(photo.id))];
  show(0);
  $("note").textContent = `Undone: ${photos.length > 1 ? plural(photos.length, "photo") : photos[0].path}`;
}

/* progress ---------------------------------------------------------------------------------------------------- */
function showProgress(found) {
  const { labelled, needed, least, held_out: heldOut, from_metadata: inside, images, table } = found;
  state.progress = found;
  const part = labelled / (needed ? least : Math.max(images, 1));
  $("bar").style.width = `${100 * part}%`;
  $("progress").setAttribute("aria-valuenow", String(Math.round(100 * part)));
  const goal = needed
    ? `${count(labelled)} of ${least} labels until the first training.`
    : `${plural(labelled, "photo")} of ${count(images)} labelled; ${count(heldOut)} of them are held out to measure the model.`;
  const fromMetadata = inside ? ` ${plural(inside, "photo")} had a caption inside.` : "";
  $("goal").textContent = labelled ? `${goal}${fromMetadata} Saved in ${table}` : `${goal} Start with the large photo: press a digit for a word, or type a caption.`;
  $("curve").textContent = found.more.length ? `Prediction for this model: ${found.more.join("; ")}.` : "";
  document.dispatchEvent(new Event("labels"));
}
function message(head, text) {
  $("message").hidden = false;
  $("message-head").textContent = head;
  $("message-text").textContent = text;
}
async function follow() {
  const library = await takeToken();
  if (!library.error) {
    if (!state.photos.length && state.view === "next") await fill();
    else { const found = await ask("/api/label"); if (!found.error && !state.busy) showProgress(found); }
  } else if (!state.photos.length) message("No photos to label yet", library.error);
  setTimeout(follow, PROGRESS_MS);
}

/* keys -------------------------------------------------------------------------------------------------------- */
$("form").addEventListener("submit", (event) => { event.preventDefault(); save(typed()); });
$("caption").addEventListener("input", () => { const photo = current(); if (photo) sessionStorage.setItem(draft(photo), $("caption").value); });
$("skip").addEventListener("click", () => save([], true));
$("undo").addEventListener("click", undo);
$("similar").addEventListener("click", () => list("similar"));
$("labelled").addEventListener("click", () => list("labelled"));
const selectAll = () => { state.selected = new Set(state.photos.map((photo) => photo.id)); draw(); };
$("all").addEventListener("click", selectAll);
$("none").addEventListener("click", () => { state.selected.clear(); draw(); });
document.addEventListener("keydown", (event) => {
  if (event.target === $("caption") && event.key === "Escape") { $("caption").blur(); return; }
  const box = event.target.matches('input[type="checkbox"]');
  if (typing(event) && !box) return;
  const digit = /^Digit([1-9])$/.exec(event.code), word = digit && current()?.suggestions[Number(digit[1]) - 1];
  const photo = current();
  const actions = {
    n: () => save([], true), u: undo, m: () => list("similar"), l: () => list("labelled"), a: selectAll,
    c: () => $("caption").focus(), x: () => photo && select(photo.id, !state.selected.has(photo.id)),
    ArrowLeft: () => show(state.at - 1), ArrowRight: () => show(state.at + 1), Escape: back,
    ...(event.target.matches("button") ? {} : { Enter: () => save(typed()) }),
  };
  const action = word ? () => (event.shiftKey ? save([...state.kept, word]) : toggle(word)) : actions[event.key];
  if (action) { event.preventDefault(); action(); }
});
follow();
