"use strict";
/* What the pages share. */
const $ = (id) => document.getElementById(id);
const count = (value) => value.toLocaleString("en");
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

async function ask(path, options) {
  const answer = await fetch(path, options).catch(() => null);
  if (!answer) return { error: "The server does not answer. Is m1clip serve still running?", lost: true };
  return answer.json().catch(() => ({ error: `The server answered ${answer.status}. Reload the page.` }));
}

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/* theme ------------------------------------------------------------------------------------------------------- */
const system = matchMedia("(prefers-color-scheme: dark)");
let theme = localStorage.getItem("m1clip-theme") || "system";
function applyTheme() {
  document.documentElement.dataset.theme = theme === "system" ? (system.matches ? "dark" : "light") : theme;
  $("theme").textContent = `Theme: ${theme}`;
  document.dispatchEvent(new Event("themechange"));
}
/* After the theme of the system comes the other one, so that every first click changes something. */
function nextTheme() {
  const themes = system.matches ? ["system", "light", "dark"] : ["system", "dark", "light"];
  theme = themes[(themes.indexOf(theme) + 1) % 3];
  localStorage.setItem("m1clip-theme", theme);
  applyTheme();
}
const typing = (event) => event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey;
$("theme").addEventListener("click", nextTheme);
system.addEventListener("change", applyTheme);
document.addEventListener("keydown", (event) => { if (event.key === "t" && !typing(event)) nextTheme(); });
applyTheme();
