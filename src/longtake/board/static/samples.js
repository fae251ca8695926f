// The page of samples: a grid of checkpoints, one checkpoint, or two compared; playing in step.
import { embedded, isTyping, make, setParameters } from "./page.js";
import { spell } from "./charts.js";
import { onLive } from "./live.js";
import { Player } from "./player.js";
import { Pair, Stage, resizeMedia } from "./stages.js";

const TINY_SIDE = 128;
const SPARK_PADDING = 4;
const LOCAL = ["before", "first"];
const SIDES = { tiny: 256, large: 400, one: 768, least: 240, around: 250, cell: 64, mostCell: 240, short: 90 };

export function startSamples() {
  const section = document.getElementById("samples-page");
  const data = embedded("samples-data");
  if (section && data) new Samples(section, data);
}

class Samples {
  constructor(section, data) {
    this.section = section;
    this.data = data;
    const { choice } = data;
    this.place = Math.max(0, data.steps.findIndex((each) => each.step === choice.step));
    this.view = choice.view;
    this.mode = choice.mode;
    this.against = choice.against;
    this.prompt = choice.prompt;
    this.gain = 4;
    this.figures = [];
    this.player = new Player(data.fps, data.frames);
    this.cells = new Map();
    for (const cell of section.querySelectorAll("td[data-step]")) this.startCell(cell);
    this.hasVideos = [data, data.other].some((each) => each && each.sets.flat().some(isVideoFile));
    this.seen = new IntersectionObserver((entries) => {
      for (const each of entries) this.see(each.target, each.isIntersecting);
    }, { rootMargin: "200px" });
    new ResizeObserver(() => this.resize()).observe(section);
    this.startControls();
    this.startTransport();
    document.addEventListener("keydown", (event) => this.key(event));
    onLive((now) => {
      if (data.sample && now.sample && now.sample !== data.sample) document.getElementById("samples-new").hidden = false;
    });
    this.setView(this.view);
    if (this.hasVideos && !matchMedia("(prefers-reduced-motion: reduce)").matches) this.player.play();
    section.dataset.started = "yes";
  }

  control(name) {
    return document.getElementById(`samples-${name}`);
  }

  startCell(cell) {
    const media = cell.querySelector("video, img");
    if (!media) return;
    this.cells.set(`${cell.dataset.step}:${cell.dataset.scene}`, media);
    if (media.matches("video")) {
      this.player.add(media);
      media.addEventListener("error", () => {
        if (media.getAttribute("src")) media.after(make("span", { class: "note" }, "cannot be shown"));
      }, { once: true });
    }
    media.addEventListener("click", () => {
      this.prompt = Number(cell.dataset.scene);
      this.place = this.placeOf(Number(cell.dataset.step));
      this.setView("single");
    });
  }

  placeOf(step) {
    return Math.max(0, this.data.steps.findIndex((each) => each.step === step));
  }

  startControls() {
    const { section } = this;
    for (const button of section.querySelectorAll("[data-samples-view]")) {
      button.addEventListener("click", () => this.setView(button.dataset.samplesView));
    }
    for (const button of section.querySelectorAll("[data-samples-mode]")) {
      button.addEventListener("click", () => this.setMode(button.dataset.samplesMode));
    }
    for (const button of section.querySelectorAll("[data-samples-move]")) {
      button.addEventListener("click", () => this.move(Number(button.dataset.samplesMove)));
    }
    for (const button of section.querySelectorAll("[data-samples-step]")) {
      button.addEventListener("click", () => this.choose(this.placeOf(Number(button.dataset.samplesStep))));
    }
    this.control("step").addEventListener("input", (event) => this.choose(this.places()[Number(event.target.value)]));
    this.control("columns").addEventListener("change", (event) => this.open({ columns: event.target.value }));
    this.control("with").addEventListener("change", (event) => this.setAgainst(event.target.value));
    this.control("gain").addEventListener("change", (event) => {
      this.gain = Number(event.target.value);
      this.setMode(this.mode);
    });
    this.control("all").addEventListener("click", () => this.choosePrompt(null));
    this.control("keys").addEventListener("click", () => this.showKeys());
    this.control("command-prompt").addEventListener("change", () => this.sayCommand());
  }

  startTransport() {
    this.control("transport").hidden = !this.hasVideos;
    const slider = this.control("frame");
    this.control("play").addEventListener("click", () => this.player.toggle());
    this.control("speed").addEventListener("change", (event) => this.player.setRate(Number(event.target.value)));
    slider.addEventListener("input", () => this.player.seek(Number(slider.value)));
    const say = () => {
      const { frame, frames, isPlaying } = this.player;
      slider.max = Math.max(0, frames - 1);
      slider.value = frame;
      this.control("play").textContent = isPlaying ? "pause" : "play";
      const { speed, pace } = this.player;
      const slow = isPlaying && pace < 0.8 ? `, slowed to ${speed.toFixed(2)}: the browser decodes no faster` : "";
      this.control("frame-note").textContent = `frame ${frame + 1} of ${Math.max(1, frames)}${slow}`;
      for (const each of this.figures) if (each.isSeen && each.pair) each.pair.draw();
    };
    this.player.onChange(say);
    say();
  }

  // A page of the same state that the server has to make.
  open(values) {
    setParameters({ ...this.parameters(), ...values });
    location.reload();
  }

  parameters() {
    const isCompare = this.view === "compare";
    return {
      preset: this.data.preset,
      step: this.data.steps[this.place].step,
      view: this.view === "grid" ? null : this.view,
      with: isCompare || this.data.other ? this.against || null : null,
      mode: isCompare && this.mode !== "side" ? this.mode : null,
      prompt: this.prompt,
    };
  }

  // Checkpoints that can be chosen: in the grid those that have a column.
  places() {
    if (this.view === "grid") return this.data.columns.map((step) => this.placeOf(step));
    const has = (place) => this.data.scenes.some((_, scene) => this.source(this.data, place, scene));
    return this.data.steps.map((_, place) => place).filter(has);
  }

  move(by) {
    const places = this.places();
    const now = places.indexOf(nearestOf(places, this.place));
    this.choose(places[Math.min(places.length - 1, Math.max(0, now + by))]);
  }

  choose(place) {
    if (place === undefined) return;
    this.place = place;
    this.refresh();
  }

  choosePrompt(prompt) {
    this.prompt = prompt;
    if (this.view !== "grid") this.makeFigures();
    this.refresh();
  }

  setView(view) {
    this.view = view;
    if (view === "compare" && !this.against) this.against = this.control("with").value;
    if (view === "grid") this.prompt = null;
    for (const button of this.section.querySelectorAll("[data-samples-view]")) {
      button.setAttribute("aria-pressed", String(button.dataset.samplesView === view));
    }
    for (const each of this.section.querySelectorAll("[data-samples-only]")) each.hidden = each.dataset.samplesOnly !== view;
    this.control("grid").hidden = view !== "grid";
    this.control("stages").hidden = view === "grid";
    if (view === "compare" && this.isElsewhere()) this.open({});
    else {
      this.makeFigures();
      this.setMode(this.mode);
    }
  }

  setMode(mode) {
    this.mode = mode;
    for (const button of this.section.querySelectorAll("[data-samples-mode]")) {
      button.setAttribute("aria-pressed", String(button.dataset.samplesMode === mode));
    }
    for (const each of this.section.querySelectorAll("[data-samples-mode-only]")) each.hidden = each.dataset.samplesModeOnly !== mode;
    for (const each of this.figures) if (each.pair) each.pair.setMode(mode, this.gain);
    this.resize();
    this.refresh();
  }

  setAgainst(against) {
    this.against = against;
    if (this.isElsewhere()) this.open({});
    else this.refresh();
  }

  // Whether the page lacks what is compared with.
  isElsewhere() {
    return Boolean(this.against) && !LOCAL.includes(this.against) && this.against !== this.data.choice.against;
  }

  // What is compared with: the videos of some run and preset, and the place of the checkpoint.
  other(place = this.place) {
    const { data } = this;
    if (this.against === "first") return [data, 0];
    if (this.against === "before") return [data, Math.max(0, place - 1)];
    const { other } = data;
    if (!other || !other.steps.length) return null;
    const step = data.steps[place].step;
    const distances = other.steps.map((each) => Math.abs(each.step - step));
    return [other, distances.indexOf(Math.min(...distances))];
  }

  // Where the video of a checkpoint and a prompt is; null: there is none.
  source(videos, place, scene) {
    const at = videos.steps[place];
    const file = at && videos.sets[at.set][scene];
    if (!file) return null;
    const label = `step ${at.step}: ${videos.scenes[scene].prompt}`;
    const isVideo = isVideoFile(file);
    if (at.media) {
      const name = encodeURIComponent(file);
      return { url: `${at.media}/${name}`, poster: isVideo ? `${at.poster}/${name}` : null, isVideo, label };
    }
    const cell = videos === this.data ? this.cells.get(`${at.step}:${scene}`) : null;
    return cell ? { url: cell.src, poster: cell.poster || null, isVideo: cell.matches("video"), label } : null;
  }

  // --- One figure a prompt ---------------------------------------------------------------------

  makeFigures() {
    for (const each of this.figures) {
      this.seen.unobserve(each.element);
      (each.pair || each.stage).close();
    }
    this.figures = [];
    if (this.view !== "grid") {
      const scenes = this.data.scenes.map((_, scene) => scene);
      const shown = this.prompt === null ? scenes : [this.prompt];
      this.figures = shown.map((scene) => this.makeFigure(scene));
    }
    this.control("stages").replaceChildren(...this.figures.map((each) => each.element));
    this.control("all").hidden = this.view === "grid" || this.prompt === null;
    for (const each of this.figures) this.seen.observe(each.element);
    this.resize();
  }

  makeFigure(scene) {
    const { prompt, note } = this.data.scenes[scene];
    const figure = { scene, isSeen: false, stage: null, pair: null };
    if (this.view === "compare") {
      figure.pair = new Pair(this.player, (percent) => {
        for (const each of this.figures) if (each.pair) each.pair.divide(percent);
      });
      figure.pair.setMode(this.mode, this.gain);
    } else figure.stage = new Stage(this.player);
    const one = make("button", { type: "button" }, "only this");
    one.hidden = this.prompt !== null;
    one.addEventListener("click", () => this.choosePrompt(scene));
    figure.element = make(
      "figure", { class: "samples-figure", "data-scene": scene },
      (figure.pair || figure.stage).element,
      make("figcaption", {}, make("span", { class: "samples-prompt", title: prompt }, prompt), make("span", { class: "note" }, `${note} `), one),
    );
    return figure;
  }

  see(element, isSeen) {
    const figure = this.figures.find((each) => each.element === element);
    if (!figure) return;
    figure.isSeen = isSeen;
    if (isSeen) this.showFigure(figure);
  }

  showFigure(figure) {
    const { data, place } = this;
    const at = (videos, where) => this.source(videos, where, figure.scene);
    const near = [at(data, place + 1), at(data, place - 1)];
    if (figure.stage) {
      figure.stage.show(at(data, place), near);
      return;
    }
    const sides = [place, place + 1, place - 1].map((each) => (data.steps[each] ? this.other(each) : null));
    const [b, ...nearB] = sides.map((side) => side && at(...side));
    figure.pair.show(at(data, place), b, near, nearB);
    figure.pair.draw();
  }

  resize() {
    const { width, height } = this.data;
    if (!width || !height) return;
    if (this.view === "grid") {
      this.resizeCells();
      return;
    }
    const room = this.control("stages").clientWidth;
    const isTiny = Math.max(width, height) < TINY_SIDE;
    const most = this.prompt !== null ? SIDES.one : isTiny ? SIDES.tiny : SIDES.large;
    const isBeside = this.view === "compare" && this.mode === "side";
    const size = this.fit(isBeside ? (room - 12) / 2 : room - 4, Math.max(SIDES.least, innerHeight - SIDES.around), most);
    for (const each of this.figures) (each.pair || each.stage).resize(size);
  }

  resizeCells() {
    const first = this.control("grid").querySelector("th");
    const room = (this.control("grid").clientWidth - first.offsetWidth) / this.data.columns.length - 10;
    const side = Math.min(SIDES.mostCell, Math.max(SIDES.cell, room));
    const size = this.fit(side, side, side);
    for (const each of this.cells.values()) resizeMedia(each, size);
    this.control("grid").classList.toggle("is-short", size[1] < SIDES.short);
  }

  // Width and height of a clip: tiny ones are enlarged by whole factors, others shrunk.
  fit(roomAcross, roomDown, side) {
    const { width, height } = this.data;
    const longer = Math.max(width, height);
    const factor = Math.min(roomAcross / width, roomDown / height, side / longer);
    const chosen = longer < TINY_SIDE ? Math.max(1, Math.floor(factor)) : Math.min(1, factor);
    return [Math.max(1, Math.round(width * chosen)), Math.max(1, Math.round(height * chosen))];
  }

  // The newest column is the last one, and the chosen one must be seen.
  scrollToChosen() {
    const grid = this.control("grid");
    const [first, chosen] = [grid.querySelector("th"), grid.querySelector("th.is-chosen")];
    if (!chosen || grid.hidden) return;
    const right = chosen.offsetLeft + chosen.offsetWidth - grid.clientWidth;
    const left = chosen.offsetLeft - first.offsetWidth;
    grid.scrollLeft = Math.min(Math.max(grid.scrollLeft, right), left);
  }

  // --- What is said of the chosen checkpoint ---------------------------------------------------

  refresh() {
    const { data, section, place } = this;
    const step = data.steps[place].step;
    for (const each of section.querySelectorAll("[data-step]")) {
      each.classList.toggle("is-chosen", Number(each.dataset.step) === step);
    }
    for (const each of this.figures) if (each.isSeen) this.showFigure(each);
    const places = this.places();
    const slider = this.control("step");
    slider.max = Math.max(0, places.length - 1);
    slider.value = places.indexOf(nearestOf(places, place));
    slider.setAttribute("aria-valuetext", `step ${step}`);
    this.control("step-note").textContent = `step ${spellStep(step)}, ${place + 1} of ${data.steps.length}`;
    this.scrollToChosen();
    this.sayMeasures(step);
    this.sayCompared(step);
    this.sayCommand();
    section.dataset.step = String(step);
    if (section.dataset.started) setParameters(this.parameters());
  }

  sayMeasures(step) {
    const { data, place } = this;
    const [first, last] = [data.steps[0].step, data.steps[data.steps.length - 1].step];
    const share = last > first ? (step - first) / (last - first) : 0.5;
    for (const each of this.section.querySelectorAll("[data-measure]")) {
      each.querySelector("b").textContent = spell(data.measures[Number(each.dataset.measure)].values[place], "");
      const line = each.querySelector(".spark-now");
      if (!line) continue;
      const { width } = line.ownerSVGElement.viewBox.baseVal;
      const x = SPARK_PADDING + share * (width - 2 * SPARK_PADDING);
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
    }
    this.control("measured-step").textContent = spellStep(step);
    this.control("alarms").replaceChildren(...data.alarms[place].map(([text, kind]) => make("li", { class: kind === "drift" ? "alarm" : "note" }, text)));
  }

  sayCompared(step) {
    const found = this.other();
    const note = this.control("compared");
    if (!found) {
      note.textContent = "Nothing to compare with: it needs a second checkpoint, a preset with the same prompts, or another run that samples this preset.";
      return;
    }
    const [videos, place] = found;
    const { step: own } = videos.steps[place];
    const name = (each) => each.title || `${each.preset}, ${each.weights || "weights not known"}`;
    const isNear = !LOCAL.includes(this.against) && own !== step ? ", the nearest that was sampled" : "";
    const how = this.mode === "difference" ? ` The picture is |A - B|, ${this.gain} times as bright; where it is black they are equal.` : "";
    const differs = (...keys) => keys.some((key) => videos[key] !== this.data[key]);
    const scaled = differs("width", "height") ? " B is scaled to the size of A." : "";
    const timed = differs("fps", "frames") ? " They have other numbers of frames." : "";
    note.textContent = `A: ${name(this.data)}, step ${spellStep(step)}. B: ${name(videos)}, step ${spellStep(own)}${isNear}.${scaled}${timed}${how}`;
  }

  sayCommand() {
    const { command, steps, sets } = this.data;
    const select = this.control("command-prompt");
    if (this.prompt !== null) select.value = String(this.prompt);
    const scene = Number(select.value) || 0;
    const at = steps[this.place];
    const file = sets[at.set][scene] || "sample.mp4";
    const parts = [command.before, `--step ${at.step}`, command.prompts[scene], `--out ${shellWord(`step_${at.step}_${file}`)}`];
    const text = parts.filter(Boolean).join(" ");
    this.control("command").textContent = text;
    this.control("copy").dataset.copy = text;
    const isThere = command.checkpoints.includes(at.step);
    this.control("command-note").textContent = isThere ? "" : `The checkpoint of step ${spellStep(at.step)} is not kept any more.`;
  }

  showKeys() {
    const note = this.control("keys-note");
    note.hidden = !note.hidden;
    this.control("keys").setAttribute("aria-expanded", String(!note.hidden));
  }

  key(event) {
    if (isTyping(event) || this.section.offsetParent === null) return;
    const target = event.target instanceof HTMLElement ? event.target : document.body;
    if (event.key.startsWith("Arrow") && target.matches("input[type=range]")) return;
    if (event.key === " " && target.matches("button, a, summary")) return;
    const keys = {
      j: () => this.move(1), ArrowRight: () => this.move(1),
      k: () => this.move(-1), ArrowLeft: () => this.move(-1),
      Home: () => this.choose(this.places()[0]), End: () => this.choose(this.places().at(-1)),
      " ": () => this.player.toggle(),
      ",": () => this.player.seek(this.player.frame - 1), ".": () => this.player.seek(this.player.frame + 1),
      g: () => this.setView("grid"), s: () => this.setView("single"),
      c: () => this.setView(this.view === "compare" ? "single" : "compare"),
      "?": () => this.showKeys(),
    };
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  }
}

function isVideoFile(file) {
  return Boolean(file) && file.toLowerCase().endsWith(".mp4");
}

function nearestOf(places, place) {
  const distances = places.map((each) => Math.abs(each - place));
  return places[distances.indexOf(Math.min(...distances))];
}

function spellStep(number) {
  return number.toLocaleString("en-US");
}

// A word for a shell.
function shellWord(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\"'\"'")}'`;
}
