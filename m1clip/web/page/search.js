"use strict";
/* The page of search: the query, its results, the large view. Names from files are only ever set as text. */
const EXAMPLES = ["two dogs on a beach", "children playing", "a sunset over water", "people at a table", "someone on a bicycle"];
const PAGE = 60, MOST = 300, LIBRARY_MS = 2000;
const FIELDS = ["text", "since", "until", "under", "orientation"];
const DATES = { since: "From", until: "To" };
const state = {
  library: null, // the server's facts about the index; null until it answers
  like: null, // {id} or {upload, preview}: the image to search by
  count: PAGE, results: [], text: "", // what is shown
  duplicates: false, large: null, // whether groups are shown; the place of the photo in the large view
  request: "", newest: false, // the request whose answer is shown; whether these are the newest photos
  marked: false, stale: false, // marks since the last ranking; photos were indexed since
};

/* requests ---------------------------------------------------------------------------------------------------- */
const send = (path, body) => ask(path, { method: "POST", body, headers: { "X-M1clip-Token": state.library?.token || "" } });

/* One request at a time. An answer is dropped if the query has changed meanwhile; the new query is sent after it. */
let running = false, again = false;
async function search() {
  again = true;
  if (running) return;
  running = true;
  while (again) {
    again = false;
    const path = request(), same = path === state.request;
    if (!same) showWaiting();
    const found = await ask(path);
    if (path !== request()) continue;
    if (same && holding()) { state.stale = true; continue; }
    state.request = path;
    show(found);
  }
  running = false;
}
/* What is shown answers the query before this one. */
function showWaiting() {
  document.querySelector("main").setAttribute("aria-busy", "true"); // dims the photos
  const words = state.duplicates ? "Comparing photos…" : "Searching…";
  status(words);
  if (!$("message").hidden) message(words, "");
}
const request = () => (state.duplicates ? "/api/duplicates" : `/api/search?${query()}`);
/* Photos keep their places while one is viewed or marked: the next key is meant for the photo that is seen. */
const holding = () => state.large !== null || state.marked;
function refresh() { if (holding()) state.stale = true; else search(); }
function query() {
  const usable = ([id, value]) => value && (!(id in DATES) || isDate(value));
  const values = Object.fromEntries(FIELDS.map((id) => [id, $(id).value.trim()]).filter(usable));
  const like = state.like ? (state.like.upload ? { upload: state.like.upload } : { like: state.like.id }) : {};
  const kept = new URLSearchParams({ ...values, ...(like.like ? like : {}) });
  history.replaceState(null, "", kept.size ? `#${kept}` : location.pathname);
  return new URLSearchParams({ ...values, ...like, count: state.count });
}
function changed() { state.count = PAGE; state.duplicates = false; search(); }

/* results ----------------------------------------------------------------------------------------------------- */
function show(found) {
  document.documentElement.dataset.shown = String(Number(document.documentElement.dataset.shown || 0) + 1);
  document.querySelector("main").removeAttribute("aria-busy");
  $("duplicates").setAttribute("aria-pressed", String(state.duplicates));
  $("clear").hidden = !(state.duplicates || state.like || FIELDS.some((id) => $(id).value));
  $("more").hidden = true;
  if (found.error) { message(state.library ? "This did not work" : "No photos yet", found.error); fill([], []); status(""); state.newest = false; return; }
  state.marked = state.stale = state.newest = false;
  $("rerank").hidden = true;
  if (state.duplicates) { showGroups(found); return; }
  state.text = found.text;
  state.newest = !found.asked;
  const matches = found.results.slice(0, found.matches), rest = found.results.slice(found.matches);
  fill(matches, rest, found.wrong);
  const ranked = matches.length && matches[0].probability === null ? "nearest photo" : "photo"; // without a cutoff
  if (found.asked) status(`${plural(matches.length, ranked)} of ${count(found.searched)} in ${found.milliseconds < 1000 ? `${Math.round(found.milliseconds)} ms` : `${(found.milliseconds / 1000).toFixed(1)} s`}`);
  else status(found.results.length ? "Newest photos" : "");
  if (matches.length) message();
  else if (found.possible) message("No sure match", "These are the nearest photos.");
  else if (rest.length) message("Nothing here matches", "These are the nearest photos.");
  else if (found.wrong.length) message("All photos are marked wrong", "Remove a mark with the same key or button.");
  else message("No photos", state.library?.images ? "No photo passes the filters." : "The index has no photos yet.");
  $("rest-head").hidden = !rest.length || !matches.length;
  $("more").hidden = found.results.length + found.wrong.length < state.count || state.count >= MOST;
}
function status(words) { $("status").textContent = words; }
function message(head, words) {
  $("message").hidden = !head;
  if (head) { $("message-head").textContent = head; $("message-text").textContent = words; }
}
/* Tiles of the same photos are reused, so that nothing flickers while typing, and the focused one keeps the focus. */
function fill(matches, rest, wrong = []) {
  const viewed = state.large === null ? null : key(state.results[state.large]);
  const focus = document.activeElement, focused = focus?.closest(".photo"), at = indexOf(focused);
  state.results = [...matches, ...rest, ...wrong];
  const tiles = new Map([...document.querySelectorAll(".photo")].map((tile) => [tile.dataset.key, tile]));
  const place = (photo) => { const tile = tiles.get(key(photo)) || makeTile(photo); update(tile, photo); return tile; };
  $("matches").replaceChildren(...matches.map(place));
  $("rest").replaceChildren(...rest.map(place));
  $("wrong").replaceChildren(...wrong.map(place));
  $("rest-head").hidden = true;
  $("wrong-head").hidden = !wrong.length;
  if (viewed !== null) {
    const now = state.results.findIndex((photo) => key(photo) === viewed);
    if (now >= 0) showLarge(now); else $("large").close();
  } else if (focused) {
    if (focused.isConnected) focus.focus({ preventScroll: true });
    else (tileAt(Math.min(at, state.results.length - 1)) || $("text")).focus({ preventScroll: true });
  }
}
const tileAt = (place) => document.querySelectorAll(".photo > button")[place];
const key = (photo) => `${photo.id}-${photo.bytes}-${photo.taken || ""}`;
const address = (photo, size) => `/photo${size}?id=${photo.id}&v=${encodeURIComponent(key(photo))}`;
function makeTile(photo) {
  const image = el("img", { src: address(photo, "/small"), loading: "lazy", decoding: "async", alt: photo.path });
  const open = el("button", { type: "button" }, image);
  const right = el("button", { type: "button", class: "right", title: "Right: key y", "aria-label": "Right" }, "✓");
  const wrong = el("button", { type: "button", class: "wrong", title: "Wrong: key n", "aria-label": "Wrong" }, "✕");
  const tile = el("div", { class: "photo" }, open, el("span", { class: "chance" }), el("span", { class: "name" }), el("span", { class: "marks" }, right, wrong));
  tile.dataset.key = key(photo);
  image.addEventListener("error", () => tile.classList.add("lost"));
  open.addEventListener("click", () => showLarge(indexOf(tile)));
  right.addEventListener("click", () => mark(state.results[indexOf(tile)], true));
  wrong.addEventListener("click", () => mark(state.results[indexOf(tile)], false));
  return tile;
}
const indexOf = (tile) => [...document.querySelectorAll(".photo")].indexOf(tile);
function update(tile, photo) {
  const [chance, name, marks] = [".chance", ".name", ".marks"].map((part) => tile.querySelector(part));
  const likely = typeof photo.probability === "number";
  chance.textContent = likely ? `${Math.round(100 * photo.probability)}%` : photo.label || "";
  chance.hidden = !chance.textContent;
  name.textContent = photo.copies ? `${photo.path} (+${photo.copies})` : photo.path;
  tile.querySelector("button").setAttribute("aria-label", photo.path);
  marks.hidden = !state.text || state.duplicates;
  tile.classList.toggle("right", photo.mark === true);
  tile.classList.toggle("wrong", photo.mark === false);
  marks.children[0].setAttribute("aria-pressed", String(photo.mark === true));
  marks.children[1].setAttribute("aria-pressed", String(photo.mark === false));
}
function showGroups({ groups, total }) {
  state.text = "";
  fill([], []);
  state.results = groups.flat();
  $("matches").replaceChildren(...groups.map((group) => {
    const tiles = group.map((photo, place) => {
      const tile = makeTile(photo);
      update(tile, { ...photo, label: `${place === 0 ? "best" : photo.equal ? "equal" : "near"}, ${photo.width} × ${photo.height}` });
      return tile;
    });
    return el("div", { class: "group" }, el("p", { class: "hint" }, plural(group.length, "photo")), el("div", { class: "photos" }, ...tiles));
  }));
  status(`${plural(total, "group")} of duplicates and near-duplicates${total > groups.length ? `; the first ${groups.length} are shown` : ""}`);
  if (total) message(); else message("No duplicates", "No two photos look alike.");
}

/* marks and similar ------------------------------------------------------------------------------------------- */
let sentMarks = Promise.resolve(); // one after the other, in the order of the keys
function mark(photo, positive) {
  if (!photo || !state.text || state.duplicates) return;
  const text = state.text, before = photo.mark, after = before === positive ? null : positive;
  photo.mark = after;
  state.marked = true;
  draw(photo);
  sentMarks = sentMarks.then(async () => {
    const answer = await send("/api/mark", JSON.stringify({ text, id: photo.id, positive: after }));
    if (!answer.error) return;
    if (photo.mark === after) photo.mark = before;
    draw(photo);
    message("The mark was not stored", answer.error);
    $("large-error").textContent = `The mark was not stored: ${answer.error}`;
  });
}
/* A photo whose mark has changed, at its place. */
function draw(photo) {
  const place = state.results.indexOf(photo), tile = document.querySelectorAll(".photo")[place];
  if (tile) update(tile, photo);
  if (state.large === place && place >= 0) showLarge(place);
  $("rerank").hidden = !state.marked;
}
async function rerank() {
  if (!state.marked || state.large !== null) return;
  const focused = document.activeElement === $("rerank");
  await sentMarks;
  state.marked = false;
  await search();
  if (focused) (tileAt(0) || $("text")).focus();
}
function similar(photo) {
  if (!photo) return;
  state.like = { id: photo.id, preview: address(photo, "/small") };
  $("text").value = "";
  $("large").close();
  drawLike(); changed(); scrollTo(0, 0);
}
async function upload(file) {
  if (!file) return;
  const limit = state.library?.max_upload || 0;
  if (file.size > limit) { message("This image is too large", `At most ${limit >> 20} MB.`); return; }
  status("Reading the image…");
  const answer = await send("/api/upload", file);
  if (answer.error) { message("This image cannot be used", answer.error); status(""); return; }
  state.like = answer;
  drawLike(); changed();
}
function drawLike() {
  $("likes").replaceChildren();
  if (!state.like) return;
  const button = el("button", { type: "button", "aria-label": "Remove the image from the search" }, el("img", { src: state.like.preview, alt: "" }));
  button.addEventListener("click", () => { state.like = null; drawLike(); changed(); $("text").focus(); });
  $("likes").append(button);
}

/* large view -------------------------------------------------------------------------------------------------- */
function showLarge(place) {
  const photo = state.results[place];
  if (!photo) return;
  state.large = place;
  const source = address(photo, "");
  if ($("large-image").getAttribute("src") !== source) $("large-image").src = source;
  $("large-image").alt = $("large-name").textContent = photo.path;
  $("large-error").textContent = "";
  const facts = [photo.taken && photo.taken.replace("T", " "), `${photo.width} × ${photo.height}`, `${count(Math.ceil(photo.bytes / 1000))} kB`];
  if (photo.copies) facts.push(plural(photo.copies, "near-duplicate"));
  if (photo.score) facts.push(`similarity ${photo.score.toFixed(3)}`);
  $("large-facts").textContent = facts.filter(Boolean).join(" · ");
  $("previous").disabled = place === 0;
  $("next").disabled = place === state.results.length - 1;
  for (const [id, positive] of [["large-right", true], ["large-wrong", false]]) {
    $(id).hidden = !state.text || state.duplicates;
    $(id).setAttribute("aria-pressed", String(photo.mark === positive));
  }
  if (!$("large").open) { $("large").showModal(); $("large-image").focus(); }
}
const step = (by) => showLarge(Math.max(0, Math.min(state.results.length - 1, state.large + by)));
const current = () => state.results[state.large ?? indexOf(document.activeElement?.closest(".photo"))];
$("large").addEventListener("close", () => {
  const tile = document.querySelectorAll(".photo")[state.large];
  state.large = null;
  $("large-image").removeAttribute("src");
  tile?.querySelector("button").focus();
  if (state.stale) refresh();
});
$("large-image").addEventListener("click", () => $("large").close());
$("previous").addEventListener("click", () => step(-1));
$("next").addEventListener("click", () => step(1));
$("close").addEventListener("click", () => $("large").close());
$("large-right").addEventListener("click", () => mark(current(), true));
$("large-wrong").addEventListener("click", () => mark(current(), false));
$("large-similar").addEventListener("click", () => similar(current()));

/* keys -------------------------------------------------------------------------------------------------------- */
function move(by) {
  const tiles = [...document.querySelectorAll(".photo")], at = indexOf(document.activeElement?.closest(".photo"));
  const columns = tiles.filter((tile) => tile.offsetTop === tiles[0].offsetTop).length;
  const to = at < 0 ? 0 : at + { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[by];
  if (to < 0) $("text").focus(); else tiles[Math.min(to, tiles.length - 1)]?.querySelector("button").focus();
}
document.addEventListener("keydown", (event) => {
  const arrow = event.key.startsWith("Arrow"), large = state.large !== null;
  if (event.target === $("text") && event.key === "ArrowDown") { move("ArrowDown"); event.preventDefault(); return; }
  if (event.target === $("text") && event.key === "Escape") { clear(); return; }
  const { value, selectionStart: start, selectionEnd: end } = $("text");
  // The key that focuses the box, pressed in it: no query begins with it.
  if (event.target === $("text") && event.key === "/" && start === 0 && end === value.length) { event.preventDefault(); return; }
  if (typing(event)) return;
  const actions = {
    "/": () => { $("large").close(); $("text").focus(); $("text").select(); },
    y: () => mark(current(), true), n: () => mark(current(), false), s: () => similar(current()), r: rerank,
    ...(large ? { ArrowLeft: () => step(-1), ArrowRight: () => step(1), ArrowUp: () => step(-1), ArrowDown: () => step(1) } : {}),
    ...(large && !event.target.matches("button") ? { " ": () => $("large").close() } : {}),
  };
  const action = actions[event.key] || (arrow ? () => move(event.key) : null);
  if (action) { event.preventDefault(); action(); }
});

/* the query --------------------------------------------------------------------------------------------------- */
function clear() {
  for (const id of FIELDS) $(id).value = "";
  checkDates();
  state.like = null;
  drawLike(); changed(); $("text").focus();
}
$("form").addEventListener("submit", (event) => { event.preventDefault(); changed(); });
$("text").addEventListener("input", changed);
function isDate(text) {
  const found = /^(\d{4})(?:-(\d\d)(?:-(\d\d))?)?$/.exec(text);
  if (!found || found[1] === "0000") return false;
  const day = `${found[1]}-${found[2] || "01"}-${found[3] || "01"}`, time = Date.parse(day);
  return !Number.isNaN(time) && new Date(time).toISOString().startsWith(day);
}
/* Says what is wrong with a date; such a one is not used. */
function checkDates() {
  const problems = [];
  for (const [id, name] of Object.entries(DATES)) {
    const value = $(id).value.trim(), valid = !value || isDate(value);
    $(id).setAttribute("aria-invalid", String(!valid));
    if (!valid) problems.push(`${name}: “${value}” is not a date yet. Write a year, month or day, such as 2024, 2024-05 or 2024-05-31.`);
  }
  $("date-error").textContent = problems.join(" ");
  return problems.length === 0;
}
for (const id of Object.keys(DATES)) $(id).addEventListener("input", () => { if (checkDates()) changed(); });
for (const id of ["under", "orientation"]) $(id).addEventListener("change", changed);
$("clear").addEventListener("click", clear);
$("rerank").addEventListener("click", rerank);
$("more").addEventListener("click", () => { state.count = Math.min(MOST, state.count + 2 * PAGE); search(); });
$("duplicates").addEventListener("click", () => {
  state.duplicates = !state.duplicates;
  search();
});
$("pick").addEventListener("change", () => { upload($("pick").files[0]); $("pick").value = ""; });
document.addEventListener("paste", (event) => upload([...event.clipboardData.files].find((file) => file.type.startsWith("image/"))));
let inside = 0;
document.addEventListener("dragenter", (event) => { event.preventDefault(); inside += 1; $("drop").hidden = false; });
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("dragleave", () => { inside -= 1; $("drop").hidden = inside <= 0; });
document.addEventListener("drop", (event) => { event.preventDefault(); inside = 0; $("drop").hidden = true; upload(event.dataTransfer.files[0]); });

/* the library ------------------------------------------------------------------------------------------------- */
function drawExamples() {
  const words = [...new Set([...(state.library?.words || []).slice(0, 8), ...EXAMPLES])];
  if (words.join() === $("examples").dataset.words) return;
  $("examples").dataset.words = words.join();
  $("examples").replaceChildren(...words.map((words) => {
    const button = el("button", { type: "button" }, words);
    button.addEventListener("click", () => { $("text").value = words; changed(); $("text").focus(); });
    return button;
  }));
}
function drawFolders(folders) {
  const chosen = $("under").value || new URLSearchParams(location.hash.slice(1)).get("under") || "";
  $("under").replaceChildren(el("option", { value: "" }, "all"), ...folders.map((name) => el("option", { value: name }, name)));
  $("under").value = folders.includes(chosen) ? chosen : "";
}
async function follow() {
  const before = state.library, library = await ask("/api/library"), failed = Boolean(library.error);
  $("link").className = `link ${failed ? "lost" : "live"}`;
  $("link-text").textContent = failed ? (library.lost ? "connection lost" : "no index") : `${plural(library.images, "photo")} · ${library.model}`;
  $("link").title = failed ? "" : library.folder;
  if (!failed) {
    state.library = library;
    if (String(before?.folders) !== String(library.folders)) drawFolders(library.folders);
    const [done, total] = library.progress || [0, 0];
    $("indexing").hidden = !library.progress;
    $("bar").style.width = `${(100 * done) / (total || 1)}%`;
    $("progress").setAttribute("aria-valuenow", String(Math.round((100 * done) / (total || 1))));
    $("indexing-text").textContent = `Indexing: ${count(done)} of ${count(total)} new photos. What is done can be searched.`;
    if (before?.images !== library.images && !state.duplicates) refresh();
  } else if (!before) {
    show(library);
  }
  drawExamples();
  setTimeout(follow, LIBRARY_MS);
}
const kept = new URLSearchParams(location.hash.slice(1));
for (const id of FIELDS) $(id).value = kept.get(id) || "";
checkDates();
if (/^\d+$/.test(kept.get("like") || "")) state.like = { id: Number(kept.get("like")), preview: `/photo/small?id=${kept.get("like")}` };
drawLike();
follow();
