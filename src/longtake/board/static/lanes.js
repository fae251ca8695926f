// The time line of a run above its plots: a lane for each kind of event, over the same x axis.
import { make } from "./page.js";

const SVG = "http://www.w3.org/2000/svg";
const LANE_HEIGHT = 18;
const LANES = {
  launches: "launches", stages: "stages", epochs: "epochs", data: "data", guard: "guard",
  checkpoints: "checkpoints", evaluations: "evaluations", nodes: "nodes",
};
const GLYPHS = {
  failure: "✕", stage: "◆", epoch: "|", settings: "◇", data: "◆",
  captions: "◇", rejected: "✕", decoder: "✕", ledger: "✕", skip: "✕", spike: "▲", rollback: "⟲",
  diverged: "✕", checkpoint: "▲", sample: "●", evaluation: "◎", drift: "~", stall: "⚠", clock: "◷",
  node: "▼", disk: "✕",
};
const NAMES = {
  launch: "launched", restart: "resumed", end: "ended", failure: "a rank failed", stage: "stage begins",
  epoch: "epoch begins", settings: "settings changed", data: "data changed", captions: "captions cut",
  rejected: "clip set aside", decoder: "decoder replaced", ledger: "ledger damaged", skip: "update skipped",
  loss: "first loss high", spike: "anomaly", rollback: "rolled back", diverged: "diverged",
  checkpoint: "checkpoint", sample: "sampled", evaluation: "evaluated", drift: "drift", stall: "stalled",
  clock: "clock stepped", node: "node degraded", disk: "disk full", ranks: "ranks differ", threads: "CPU threads",
};

// Drawn, and not letters: not every font has them.
const SHAPES = {
  launch: "M-4,-5 L5,0 L-4,5 Z", end: "M-4,-4 H4 V4 H-4 Z",
  restart: "M5,0 A5,5 0 1 1 -5,0 A5,5 0 1 1 5,0 Z M2,0 A2,2 0 1 0 -2,0 A2,2 0 1 0 2,0 Z",
};

// Draws the marks within a span of x; in lanes that have some.
export function drawLanes(marks, span, axis, data) {
  const host = document.getElementById("lanes");
  if (!host) return;
  const begin = data.x.length ? data.x[0] : span[0];
  // A launch lies before its first step, where nothing is plotted yet: it stands at that step.
  const within = (value) => (value === null || value === undefined ? null : Math.max(value, begin));
  const x = axis === "step" ? (mark) => within(mark.step) : axis === "time" ? (mark) => within(mark.time) : () => null;
  const used = Object.keys(LANES).filter((lane) => marks.some((mark) => mark.lane === lane));
  const height = used.length * LANE_HEIGHT + 2;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("width", "100%");
  svg.setAttribute("height", height);
  const labels = make("div", { class: "lane-labels" });
  used.forEach((lane, row) => {
    labels.append(make("span", {}, LANES[lane]));
    const line = element("line", { x1: 0, x2: "100%", y1: row * LANE_HEIGHT + 9, y2: row * LANE_HEIGHT + 9, class: "rule" });
    svg.append(line);
  });
  const percent = (value) => `${(100 * (value - span[0])) / (span[1] - span[0] || 1)}%`;
  for (const mark of marks) {
    const row = used.indexOf(mark.lane);
    const where = x(mark);
    if (where === null || where < span[0] || where > span[1]) continue;
    const middle = row * LANE_HEIGHT + 9;
    if (mark.span && axis === "step" && mark.span[1] > mark.span[0]) {
      const [first, last] = [Math.max(span[0], mark.span[0]), Math.min(span[1], mark.span[1])];
      svg.append(element("rect", {
        x: percent(first), y: middle - 5, height: 10, class: "lane-span",
        width: `${Math.max(0, (100 * (last - first)) / (span[1] - span[0]))}%`,
      }));
    }
    const glyph = draw(mark.kind, percent(where), middle, `mark mark-${mark.level}`);
    const title = element("title", {});
    title.textContent = mark.text;
    glyph.append(title);
    glyph.addEventListener("click", () => say(mark));
    svg.append(glyph);
  }
  host.querySelector(".lane-labels").replaceWith(labels);
  host.querySelector("svg").replaceWith(svg);
  drawLegend(new Set(marks.map((mark) => mark.kind)));
  host.hidden = used.length === 0 || axis === "batch";
}

// A line below the lanes that names the marks that are there.
function drawLegend(kinds) {
  const items = Object.keys(NAMES).filter((kind) => kinds.has(kind)).map((kind) => {
    const picture = document.createElementNS(SVG, "svg");
    picture.setAttribute("width", 14);
    picture.setAttribute("height", 14);
    picture.append(draw(kind, 7, 7, "legend-mark"));
    const item = make("span", {});
    item.append(picture, NAMES[kind]);
    return item;
  });
  document.getElementById("lanes-legend").replaceChildren(...items);
}

// The mark of a kind of event around a point.
function draw(kind, x, middle, look) {
  if (SHAPES[kind]) {
    const glyph = element("svg", { x, y: middle, overflow: "visible", class: look, "data-kind": kind });
    glyph.append(element("path", { d: SHAPES[kind], fill: "currentColor", "fill-rule": "evenodd" }));
    return glyph;
  }
  const glyph = element("text", { x, y: middle + 4, "text-anchor": "middle", class: look, "data-kind": kind });
  glyph.textContent = GLYPHS[kind] || "•";
  return glyph;
}

// Puts the lanes exactly above the plots.
export function placeLanes(box) {
  const host = document.getElementById("lanes");
  const svg = host ? host.querySelector("svg") : null;
  if (!svg) return;
  const own = host.getBoundingClientRect();
  svg.style.marginLeft = `${box.left - own.left}px`;
  svg.style.width = `${box.width}px`;
}

function say(mark) {
  const note = document.getElementById("mark-note");
  const when = mark.time ? new Date(mark.time * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC: " : "";
  note.textContent = when + mark.text;
  note.className = mark.level === "info" ? "note" : mark.level === "warn" ? "warn" : "bad";
}

function element(name, attributes) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  return found;
}
