// The list of runs: filtered, sorted, kept up to date, and selected for a comparison.
import { followEvents } from "./live.js";
import { make, parameter, setParameters } from "./page.js";

export function startRuns() {
  const table = document.getElementById("runs");
  if (!table) return;
  const rows = [...table.querySelectorAll("tbody tr")];
  startFilter(rows);
  startSelection(rows);
  startSorting(table, rows);
  followList(table, rows);
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
    for (const video of table.querySelectorAll("video")) video.removeAttribute("autoplay");
  }
}

function startFilter(rows) {
  const field = document.getElementById("filter");
  const apply = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.dataset.words.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    setParameters({ filter: field.value });
  };
  field.value = parameter("filter") || "";
  field.addEventListener("input", apply);
  field.addEventListener("keydown", (event) => { if (event.key === "Enter") event.preventDefault(); });
  if (field.value) apply();
}

function startSelection(rows) {
  const button = document.getElementById("compare");
  const boxes = rows.map((row) => row.querySelector("input[type=checkbox]"));
  const count = () => {
    const chosen = boxes.filter((box) => box.checked).length;
    button.disabled = chosen < 2;
    button.textContent = chosen ? `Compare ${chosen} runs` : "Compare";
  };
  for (const box of boxes) box.addEventListener("change", count);
  count();
}

function startSorting(table, rows) {
  for (const head of table.querySelectorAll("th[data-sort]")) {
    const button = make("button", { type: "button", class: "sort" }, head.textContent);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const wasRising = head.getAttribute("aria-sort") === "ascending";
      for (const each of table.querySelectorAll("th[aria-sort]")) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", wasRising ? "descending" : "ascending");
      const key = head.dataset.sort;
      const sorted = rows.toSorted((a, b) => compareValues(a.dataset[key], b.dataset[key]));
      table.tBodies[0].append(...(wasRising ? sorted.reverse() : sorted));
    });
  }
}

function compareValues(a, b) {
  if (a === "" || b === "") return (a === "") - (b === "");
  const [x, y] = [Number(a), Number(b)];
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
}

function followList(table, rows) {
  const url = table.dataset.liveList;
  if (!url) return;
  const known = new Map(rows.map((row) => [row.dataset.run, row]));
  followEvents(url, (message) => showList(message.runs, known));
}

function showList(runs, known) {
  const fresh = runs.filter((run) => !known.has(run.path));
  const note = document.getElementById("new-runs");
  note.hidden = fresh.length === 0;
  note.textContent = `Show ${fresh.length} new run${fresh.length === 1 ? "" : "s"}`;
  for (const run of runs) {
    const row = known.get(run.path);
    if (row) updateRow(row, run);
  }
}

function updateRow(row, run) {
  for (const field of row.querySelectorAll("[data-field]")) {
    const key = field.dataset.field;
    if (key === "state") field.className = `state state-${run.state || "unknown"}`;
    const text = key === "loss" ? spellLoss(run.loss) : run.line[key];
    if (field.textContent !== text) field.textContent = text;
  }
  const bar = row.querySelector("progress");
  if (bar) bar.value = run.steps;
}

function spellLoss(loss) {
  return loss === null ? "-" : String(Number(loss.toPrecision(4)));
}
