// Curves of several runs over each other, on one x axis of steps.
import { embedded } from "./page.js";
import { axisStyle, css, spell, xAxis, yAxis, SERIES_COLOURS } from "./charts.js";

export function startComparison() {
  const host = document.getElementById("comparison");
  if (!host) return;
  const curves = embedded("curves");
  const plots = [...host.querySelectorAll("[data-compared]")].map((figure) => new ComparedPanel(figure, curves));
  new ResizeObserver(() => { for (const each of plots) each.resize(); }).observe(host);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const each of plots) each.draw(); });
  host.dataset.drawn = "true";
}

class ComparedPanel {
  constructor(figure, curves) {
    this.canvas = figure.querySelector(".plot");
    this.readout = figure.querySelector(".readout");
    this.curves = curves;
    this.name = figure.dataset.compared;
    const button = figure.querySelector("[data-log]");
    this.isLog = button.getAttribute("aria-pressed") === "true";
    button.addEventListener("click", () => {
      this.isLog = !this.isLog;
      button.setAttribute("aria-pressed", String(this.isLog));
      this.draw();
    });
    this.draw();
  }

  draw() {
    if (this.plot) this.plot.destroy();
    const clean = (values) => values.map((value) => (this.isLog && !(value > 0) ? null : value));
    const own = this.curves.map((curve) => curve.series.find((each) => each.name === this.name));
    const tables = this.curves.map((curve, place) => [curve.x, clean(own[place].mean)]);
    const unit = own[0].unit;
    const axis = axisStyle();
    const options = {
      width: this.canvas.clientWidth || 300, height: 220, legend: { show: false }, padding: [8, 20, 0, 0],
      scales: { x: { time: false }, y: { distr: this.isLog ? 3 : 1 } },
      axes: [
        xAxis(axis, false),
        yAxis(axis, unit, this.isLog),
      ],
      series: [{}, ...this.curves.map((curve, place) => ({
        label: curve.name, stroke: () => css(SERIES_COLOURS[place % SERIES_COLOURS.length]), width: 1.6, spanGaps: true,
        dash: place >= SERIES_COLOURS.length ? [6, 4] : [], points: { show: false },
      }))],
      cursor: { sync: { key: "comparison" } },
      hooks: { setCursor: [(plot) => this.say(plot, unit)] },
    };
    this.plot = new uPlot(options, uPlot.join(tables), this.canvas);
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (width && width !== this.plot.width) this.plot.setSize({ width, height: this.plot.height });
  }

  say(plot, unit) {
    const place = plot.cursor.idx;
    if (place === null || place === undefined) return;
    const values = this.curves.map((curve, index) => {
      const value = plot.data[index + 1][place];
      return value === null || value === undefined ? "" : `${curve.name} ${spell(value, unit)}`;
    });
    this.readout.textContent = [`step ${plot.data[0][place].toLocaleString("en-US")}`, ...values.filter(Boolean)].join(" · ");
  }
}
