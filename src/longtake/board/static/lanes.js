// The time line of a run above its plots: a lane for each kind of event, over the same x axis.
import { make } from "./page.js";

const SVG = "http://www.w3.org/2000/svg";
const LANE_HEIGHT = 18;
const LANES = {
  launches: "launches", stages: "stages", data: "data", guard: "guard",
  checkpoints: "checkpoints", evaluations: "evaluations", nodes: "nodes",
};
const GLYPHS = {
  failure: "✕", stage: "◆", epoch: "|", settings: "◇", data: "◆",
  captions: "◇", rejected: "✕", decoder: "✕", ledger: "✕", skip: "✕", spike: "▲", rollback: "⟲",
  diverged: "✕", checkpoint: "▲", sample: "●", evaluation: "◎", drift: "~", stall: "⚠", clock: "◷",
  node: "▼", disk: "✕",
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
    const look = `mark mark-${mark.level}`;
    let glyph;
    if (SHAPES[mark.kind]) {
      glyph = element("svg", { x: percent(where), y: middle, overflow: "visible", class: look, "data-kind": mark.kind });
      glyph.append(element("path", { d: SHAPES[mark.kind], fill: "currentColor", "fill-rule": "evenodd" }));
    } else {
      glyph = element("text", { x: percent(where), y: middle + 4, "text-anchor": "middle", class: look, "data-kind": mark.kind });
      glyph.textContent = GLYPHS[mark.kind] || "•";
    }
    const title = element("title", {});
    title.textContent = mark.text;
    glyph.append(title);
    glyph.addEventListener("click", () => say(mark));
    svg.append(glyph);
  }
  host.querySelector(".lane-labels").replaceWith(labels);
  host.querySelector("svg").replaceWith(svg);
  host.hidden = used.length === 0 || axis === "batch";
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
