// Plots of a run's numbers: one x axis, one cursor and one zoom for all panels and the time line.
import { embedded, make, parameter, setParameters } from "./page.js";
import { drawLanes, placeLanes } from "./lanes.js";
import { onLive } from "./live.js";

const SYNC = "run";
const AXIS_WIDTH = 64;
const DATA_LIMIT_MS = 1000;
export const SERIES_COLOURS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7", "--s8"];
const RAW = "--raw";

export function startCharts() {
  const host = document.getElementById("charts");
  if (!host) return;
  const charts = new Charts(host);
  charts.load();
  onLive((now) => charts.follow(now));
}

class Charts {
  constructor(host) {
    this.host = host;
    this.url = host.dataset.series;
    this.marks = embedded("marks") || [];
    this.samples = embedded("marked-samples") || [];
    this.planned = Number(host.dataset.plannedBytes) || null;
    this.x = ["time", "batch"].includes(parameter("x")) ? parameter("x") : "step";
    this.range = readRange();
    this.logarithmic = new Set((parameter("log") ?? host.dataset.log).split(",").filter(Boolean));
    this.shown = new Set((parameter("also") ?? "").split(",").filter(Boolean));
    this.panels = [...host.querySelectorAll("[data-panel]")].map((element) => new Panel(element, this));
    this.newest = 0;
    this.loading = false;
    this.startControls();
  }

  startControls() {
    for (const button of document.querySelectorAll("[data-axis]")) {
      button.setAttribute("aria-pressed", String(button.dataset.axis === this.x));
      button.addEventListener("click", () => {
        this.x = button.dataset.axis;
        this.range = null;
        setParameters({ x: this.x === "step" ? null : this.x, from: null, to: null });
        for (const each of document.querySelectorAll("[data-axis]")) {
          each.setAttribute("aria-pressed", String(each === button));
        }
        this.load();
      });
    }
    const reset = document.querySelector("[data-reset]");
    if (reset) reset.addEventListener("click", () => this.zoom(null));
    const watcher = new ResizeObserver(() => { for (const panel of this.panels) panel.resize(); });
    watcher.observe(this.host);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  names() {
    return [...new Set(this.panels.flatMap((panel) => panel.names()))];
  }

  async load() {
    if (this.loading) {
      this.again = true;
      return;
    }
    this.loading = true;
    try {
      this.data = await this.read();
      this.newest = this.data.newest;
      this.draw();
    } catch (error) {
      this.host.dataset.error = String(error);
    } finally {
      this.loading = false;
      if (this.again) {
        this.again = false;
        setTimeout(() => this.load(), DATA_LIMIT_MS);
      }
    }
  }

  async read() {
    if (!this.url) return embedded("series");
    const query = new URLSearchParams({ names: this.names().join(","), x: this.x, pixels: 1000 });
    if (this.range && this.x === "step") {
      query.set("first", Math.max(0, Math.floor(this.range[0])));
      query.set("last", Math.max(0, Math.ceil(this.range[1])));
    }
    const answer = await fetch(`${this.url}?${query}`);
    if (!answer.ok) throw new Error(`${answer.status}`);
    return answer.json();
  }

  // Draws what is new, unless the page shows a part of the steps that does not change.
  follow(now) {
    if (!this.url || now.steps === undefined) return;
    const isNew = now.steps !== this.newest;
    if (isNew && (!this.range || now.steps < this.newest || this.range[1] >= this.newest)) this.load();
  }

  draw() {
    if (!this.data) return;
    for (const panel of this.panels) panel.draw(this.data);
    const first = this.panels[0];
    if (first && first.plot) drawLanes(this.marks, this.span(), this.x, this.data);
    this.placeLanes();
    this.host.dataset.drawn = String(this.newest);
  }

  placeLanes() {
    const plot = this.panels.length ? this.panels[0].plot : null;
    if (plot) placeLanes(plot.over.getBoundingClientRect());
  }

  // The x values that are shown.
  span() {
    if (this.range) return this.range;
    const x = this.data.x;
    const ends = x.length ? [x[0], x[x.length - 1]] : [0, 1];
    for (const branch of this.data.branches) ends[1] = Math.max(ends[1], branch.last);
    if (this.x === "step") for (const mark of this.marks) ends[1] = Math.max(ends[1], mark.step ?? 0);
    return ends[0] === ends[1] ? [ends[0] - 0.5, ends[1] + 0.5] : ends;
  }

  zoom(range) {
    this.range = range;
    const [from, to] = range || [null, null];
    setParameters({ from: from && Number(from.toPrecision(9)), to: to && Number(to.toPrecision(9)) });
    if (this.url && this.x === "step") this.load();
    else this.draw();
  }

  nearestSample(step) {
    let best = null;
    for (const each of this.samples) {
      if (!best || Math.abs(each.step - step) < Math.abs(best.step - step)) best = each;
    }
    return best;
  }
}

function readRange() {
  const [from, to] = [Number(parameter("from")), Number(parameter("to"))];
  return parameter("to") && to > from ? [from, to] : null;
}

class Panel {
  constructor(element, charts) {
    this.element = element;
    this.charts = charts;
    const given = JSON.parse(element.dataset.panel);
    this.key = given.key;
    this.own = given.names;
    this.more = given.more;
    this.title = given.title;
    this.canvas = element.querySelector(".plot");
    this.readout = element.querySelector(".readout");
    this.plot = null;
    this.startControls();
  }

  startControls() {
    const log = this.element.querySelector("[data-log]");
    log.setAttribute("aria-pressed", String(this.charts.logarithmic.has(this.key)));
    log.addEventListener("click", () => {
      toggle(this.charts.logarithmic, this.key);
      log.setAttribute("aria-pressed", String(this.charts.logarithmic.has(this.key)));
      setParameters({ log: [...this.charts.logarithmic].join(",") });
      this.destroy();
      this.charts.draw();
    });
    const also = this.element.querySelector("[data-also]");
    if (!also) return;
    also.setAttribute("aria-pressed", String(this.showsMore()));
    also.addEventListener("click", () => {
      toggle(this.charts.shown, this.key);
      also.setAttribute("aria-pressed", String(this.showsMore()));
      setParameters({ also: [...this.charts.shown].join(",") });
      this.destroy();
      this.charts.load();
    });
  }

  showsMore() {
    return this.charts.shown.has(this.key);
  }

  names() {
    return this.showsMore() ? [...this.own, ...this.more] : this.own;
  }

  destroy() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (this.plot && width && width !== this.plot.width) {
      this.plot.setSize({ width, height: this.plot.height });
      this.charts.placeLanes();
    }
  }

  draw(data) {
    this.series = this.names().map((name) => data.series.find((each) => each.name === name)).filter(Boolean);
    this.branches = data.branches.map((branch) => ({
      ...branch, series: branch.series.filter((each) => this.own.includes(each.name)),
    }));
    const isLog = this.charts.logarithmic.has(this.key);
    const clean = (values) => (isLog ? values.map((value) => (value > 0 ? value : null)) : values);
    const columns = [data.x];
    const plotted = [{}];
    const bands = [];
    this.series.forEach((each, place) => {
      const colour = () => css(colourOf(each.name, place));
      const isPale = each.name === "loss" && this.series.length > 1;
      if (each.low) {
        bands.push({ series: [columns.length, columns.length + 1], fill: () => alpha(colour(), 0.25) });
        for (const edge of [each.high, each.low]) {
          columns.push(clean(edge));
          plotted.push({ show: true, stroke: () => alpha(colour(), 0.25), width: 1, points: { show: false } });
        }
      }
      columns.push(clean(each.mean));
      plotted.push({
        label: each.label, stroke: colour, width: isPale ? 1 : 1.6, spanGaps: each.sparse,
        points: { show: data.x.length < 60, size: 4 },
      });
    });
    const [from, to] = this.charts.span();
    if (this.plot && (this.plot.series.length !== plotted.length || this.x !== this.charts.x)) this.destroy();
    this.x = this.charts.x;
    if (!this.plot) this.make(columns, plotted, bands, isLog);
    else this.plot.setData(columns, false);
    this.plot.setScale("x", { min: from, max: to });
    this.say(null);
  }

  make(columns, plotted, bands, isLog) {
    const unit = this.series.length ? this.series[0].unit : "";
    const axis = axisStyle();
    const isTime = this.charts.x === "time";
    const options = {
      width: this.canvas.clientWidth || 300, height: this.key === "loss" ? 260 : 150,
      scales: {
        x: { time: isTime, auto: false },
        y: { distr: isLog ? 3 : 1, range: (plot, low, high) => this.yRange(low, high, isLog) },
      },
      axes: [
        xAxis(axis, isTime),
        yAxis(axis, unit, isLog),
      ],
      series: plotted, bands, legend: { show: false }, padding: [8, 20, 0, 0],
      cursor: { sync: { key: SYNC, scales: ["x", null] }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
      hooks: {
        ready: [() => this.charts.placeLanes()],
        setSelect: [(plot) => this.selected(plot)],
        setCursor: [(plot) => this.say(plot.cursor.idx)],
        drawClear: [(plot) => this.shadeRollbacks(plot)],
        draw: [(plot) => this.drawMore(plot)],
      },
    };
    this.plot = new uPlot(options, columns, this.canvas);
    this.plot.over.addEventListener("dblclick", () => this.charts.zoom(null));
  }

  // With room, and with what branches and the plan need beside the numbers that uPlot knows.
  yRange(low, high, isLog) {
    const values = [low, high].filter((value) => value !== null);
    const [from, to] = this.charts.span();
    for (const branch of this.branches) {
      for (const each of branch.series) {
        branch.x.forEach((x, place) => {
          const value = each.mean[place];
          if (value !== null && x >= from && x <= to && (!isLog || value > 0)) values.push(value);
        });
      }
    }
    if (this.key === "memory" && this.charts.planned) values.push(this.charts.planned, 0);
    if (["seconds", "speed"].includes(this.key) && !isLog) values.push(0);
    if (!values.length) return [isLog ? 0.1 : 0, 1];
    const [least, most] = [Math.min(...values), Math.max(...values)];
    if (isLog) return [least / 1.15, most * 1.15];
    const room = (most - least || Math.abs(most) || 1) * 0.05;
    return [least === 0 ? 0 : least - room, most + room];
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width > 4) this.charts.zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  shadeRollbacks(plot) {
    if (this.charts.x !== "step") return;
    const { left, top, width, height } = plot.bbox;
    plot.ctx.fillStyle = css("--shade");
    for (const mark of this.charts.marks) {
      if (mark.kind !== "rollback" || !mark.span) continue;
      const ends = mark.span.map((step) => plot.valToPos(step, "x", true));
      const [from, to] = [Math.max(left, ends[0]), Math.min(left + width, ends[1])];
      if (to > from) plot.ctx.fillRect(from, top, to - from, height);
    }
  }

  // Branches that were given up, the plan's memory, and crosses for numbers that are not finite.
  drawMore(plot) {
    const context = plot.ctx;
    const { left, top, width, height } = plot.bbox;
    const at = (x, y) => [plot.valToPos(x, "x", true), plot.valToPos(y, "y", true)];
    const isLog = this.charts.logarithmic.has(this.key);
    context.save();
    context.beginPath();
    context.rect(left, top, width, height);
    context.clip();
    for (const branch of this.branches) {
      context.strokeStyle = alpha(css("--s1"), 0.75);
      context.lineWidth = 1.25 * devicePixelRatio;
      context.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
      for (const each of branch.series) {
        context.beginPath();
        let isDown = false;
        branch.x.forEach((x, place) => {
          const value = each.mean[place];
          const isGap = value === null || (isLog && value <= 0);
          if (!isGap) context[isDown ? "lineTo" : "moveTo"](...at(x, value));
          isDown = !isGap;
        });
        context.stroke();
      }
    }
    context.setLineDash([]);
    if (this.key === "memory" && this.charts.planned) {
      const [, y] = at(0, this.charts.planned);
      context.strokeStyle = css("--warn");
      context.beginPath();
      context.moveTo(left, y);
      context.lineTo(left + width, y);
      context.stroke();
    }
    context.strokeStyle = css("--bad");
    context.lineWidth = 1.5 * devicePixelRatio;
    const size = 4 * devicePixelRatio;
    for (const x of this.series.flatMap((each) => each.bad)) {
      const [place] = at(x, 1);
      context.beginPath();
      context.moveTo(place - size, top + size / 2);
      context.lineTo(place + size, top + 2.5 * size);
      context.moveTo(place + size, top + size / 2);
      context.lineTo(place - size, top + 2.5 * size);
      context.stroke();
    }
    context.restore();
  }

  // The numbers under the cursor, or the newest ones.
  say(place) {
    const data = this.charts.data;
    const isHovered = place !== null && place !== undefined;
    const where = isHovered ? place : data.x.length - 1;
    const parts = [];
    if (isHovered && this.key === "loss") parts.push(make("span", { class: "where" }, this.spellX(data.x[where])));
    this.series.forEach((each, index) => {
      const swatch = make("span", { class: `swatch ${colourOf(each.name, index).slice(2)}` });
      let text = spell(each.mean[where], each.unit);
      if (each.low && each.low[where] !== null && each.low[where] < each.high[where]) {
        text += ` (${spell(each.low[where], "")} to ${spell(each.high[where], each.unit)})`;
      }
      parts.push(make("span", {}, swatch, `${each.label} `, make("b", {}, text)));
    });
    if (this.key === "memory" && this.charts.planned) {
      parts.push(make("span", { class: "warn" }, `planned ${spell(this.charts.planned, "B")}`));
    }
    this.readout.replaceChildren(...parts);
    if (this.key === "loss") this.saySample(isHovered && this.charts.x === "step" ? data.x[where] : null);
  }

  spellX(value) {
    if (this.charts.x === "time") return new Date(value * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC";
    return `${this.charts.x} ${value.toLocaleString("en-US")}`;
  }

  saySample(step) {
    const link = document.getElementById("nearest-sample");
    if (!link || step === null) return;
    const sample = this.charts.nearestSample(step);
    if (!sample) return;
    link.hidden = false;
    link.href = sample.page;
    link.textContent = `sample of step ${sample.step.toLocaleString("en-US")}`;
  }
}

function toggle(set, key) {
  if (set.has(key)) set.delete(key);
  else set.add(key);
}

function colourOf(name, place) {
  return name === "loss" ? RAW : SERIES_COLOURS[name === "loss_smoothed" ? 0 : place % SERIES_COLOURS.length];
}

export function axisStyle() {
  const rule = () => css("--rule");
  return {
    stroke: () => css("--pale"), font: "11px system-ui, sans-serif",
    grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1, size: 4 },
  };
}

const LABEL_PIXELS = 18;
const WHOLE_STEPS = [1, 2, 5].flatMap((first) => [...Array(13).keys()].map((power) => first * 10 ** power)).sort((x, y) => x - y);

export function xAxis(axis, isTime) {
  const spellTicks = (plot, ticks) => ticks.map((tick) => tick.toLocaleString("en-US"));
  return { ...axis, size: 26, values: isTime ? undefined : spellTicks, incrs: isTime ? undefined : WHOLE_STEPS };
}

// Numbers in the unit that stands beside the title.
export function yAxis(axis, unit, isLog) {
  const scale = unit === "B" ? 2 ** 30 : 1;
  const roomy = (plot, ticks) => (isLog ? withRoom(plot, ticks) : ticks);
  return {
    ...axis, size: AXIS_WIDTH, filter: roomy, grid: { ...axis.grid, filter: roomy }, ticks: { ...axis.ticks, filter: roomy },
    values: (plot, ticks) => ticks.map((tick) => (tick === null ? "" : spell(tick / scale, ""))),
  };
}

// Of a logarithmic axis: powers of ten first, then their doubles and fives, then others, where there is room.
function withRoom(plot, ticks) {
  const rank = (tick) => {
    const digit = tick / 10 ** Math.floor(Math.log10(tick) + 1e-9);
    if (Math.abs(digit - Math.round(digit)) > 1e-6) return null;
    return Math.round(digit) === 1 ? 0 : [2, 5].includes(Math.round(digit)) ? 1 : 2;
  };
  const kept = [];
  for (const wanted of [0, 1, 2]) {
    for (const tick of ticks) {
      const place = plot.valToPos(tick, "y");
      if (rank(tick) === wanted && kept.every((each) => Math.abs(each.place - place) >= LABEL_PIXELS)) kept.push({ tick, place });
    }
  }
  const shown = new Set(kept.map((each) => each.tick));
  return ticks.map((tick) => (shown.has(tick) ? tick : null));
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function alpha(colour, share) {
  return `${colour}${Math.round(255 * share).toString(16).padStart(2, "0")}`;
}

// A number with its unit: bytes in GiB, small and large numbers with an exponent.
export function spell(value, unit) {
  if (value === null || value === undefined) return "-";
  if (unit === "B") return `${(value / 2 ** 30).toPrecision(4)} GiB`;
  const size = Math.abs(value);
  const isPlain = value === 0 || (size >= 1e-3 && size < 1e6);
  const text = isPlain ? String(Number(value.toPrecision(4))) : value.toExponential(2);
  return unit ? `${text} ${unit}` : text;
}
