// Large videos of one prompt: of one checkpoint, or of two that are compared.
import { make } from "./page.js";

const READY_MS = 1500;

// One place on the page that shows one video after the other without a flash between them: the next
// and the previous one are loaded before they are asked for.
export class Stage {
  constructor(player) {
    this.player = player;
    this.element = make("div", { class: "samples-layers" });
    this.note = make("p", { class: "note" });
    this.note.hidden = true;
    this.element.append(this.note);
    this.layers = new Map();
    this.current = null;
    this.wanted = null;
    this.size = null;
  }

  // A source has url, poster, isVideo and label; null: there is none.
  show(source, near = []) {
    const url = source && (source.url || source.poster);
    this.note.hidden = Boolean(url);
    this.note.textContent = url ? "" : "not sampled";
    this.wanted = url || null;
    if (!url) this.exchange(null);
    else if (!this.current || this.current !== this.layers.get(url)) this.prepare(source, url);
    const kept = new Set([url, ...near.filter(Boolean).map((each) => each.url)]);
    for (const each of near) if (each && each.url) this.layer(each, each.url);
    for (const [name, layer] of this.layers) {
      if (!kept.has(name) && layer !== this.current) this.drop(name, layer);
    }
  }

  layer(source, url) {
    const known = this.layers.get(url);
    if (known) return known;
    const isVideo = source.isVideo && Boolean(source.url);
    const made = isVideo
      ? make("video", { playsinline: "", loop: "", preload: "auto", src: url, "aria-label": source.label })
      : make("img", { src: url, alt: source.label });
    if (isVideo) {
      made.muted = true;
      if (source.poster) made.poster = source.poster;
    }
    made.addEventListener("error", () => { made.dataset.failed = "yes"; if (made === this.current) this.fail(); });
    if (this.size) resizeMedia(made, this.size);
    this.layers.set(url, made);
    this.element.append(made);
    return made;
  }

  async prepare(source, url) {
    const layer = this.layer(source, url);
    if (!this.current) {
      this.exchange(layer);
      return;
    }
    await isReady(layer, this.player);
    if (this.wanted === url) this.exchange(layer);
  }

  exchange(layer) {
    if (this.current) {
      this.current.classList.remove("is-current");
      if (this.current.matches("video")) this.player.remove(this.current);
    }
    this.current = layer;
    if (!layer) return;
    layer.classList.add("is-current");
    this.note.hidden = true;
    if (layer.dataset.failed) this.fail();
    if (layer.matches("video")) this.player.add(layer, true);
    this.player.say();
  }

  fail() {
    this.note.hidden = false;
    this.note.textContent = "This file cannot be shown: it is damaged, or gone.";
  }

  resize(size) {
    this.size = size;
    for (const layer of this.layers.values()) resizeMedia(layer, size);
  }

  drop(url, layer) {
    this.layers.delete(url);
    layer.remove();
    if (layer.matches("video")) {
      layer.removeAttribute("src");
      layer.load();
    }
  }

  close() {
    this.exchange(null);
    for (const [url, layer] of this.layers) this.drop(url, layer);
  }
}

export function resizeMedia(element, [width, height]) {
  element.setAttribute("width", width);
  element.setAttribute("height", height);
}

// Waits until a hidden layer shows the frame that the others show; not for ever.
function isReady(layer, player) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, READY_MS);
    const done = () => { clearTimeout(timer); resolve(); };
    if (!layer.matches("video")) {
      layer.decode().then(done, done);
      return;
    }
    layer.addEventListener("error", done, { once: true });
    const seek = () => {
      const target = player.target(layer);
      if (Math.abs(layer.currentTime - target) < 0.5 / player.fps) return done();
      layer.addEventListener("seeked", done, { once: true });
      layer.currentTime = target;
      return null;
    };
    if (layer.readyState >= 2) seek();
    else layer.addEventListener("loadeddata", seek, { once: true });
  });
}

// Two stages: side by side, one over the other with a divider, or their difference.
export class Pair {
  constructor(player, onDivide) {
    this.player = player;
    this.a = new Stage(player);
    this.b = new Stage(player);
    this.labels = ["A", "B"].map((name) => make("span", { class: "samples-label" }, name));
    this.canvas = make("canvas", { role: "img", "aria-label": "difference of A and B" });
    this.divider = make("input", { type: "range", min: 0, max: 100, step: 0.5, value: 50, class: "samples-divider", "aria-label": "Divider: A is left of it, B right" });
    this.divider.addEventListener("input", () => onDivide(Number(this.divider.value)));
    this.sides = [this.a, this.b].map((stage, place) => make("div", { class: `samples-side side-${place ? "b" : "a"}` }, stage.element, this.labels[place]));
    this.element = make("div", { class: "samples-pair" }, ...this.sides, this.canvas, this.divider);
    this.gain = 4;
    this.mode = "side";
    this.drawn = "";
  }

  setMode(mode, gain) {
    this.mode = mode;
    this.gain = gain;
    this.element.dataset.mode = mode;
    this.canvas.hidden = mode !== "difference";
    this.divider.hidden = mode !== "swipe";
    this.divide(Number(this.divider.value));
    this.drawn = "";
    this.draw();
  }

  divide(percent) {
    this.divider.value = percent;
    this.sides[1].style.clipPath = this.mode === "swipe" ? `inset(0 0 0 ${percent}%)` : "";
  }

  show(a, b, nearA, nearB) {
    this.a.show(a, nearA);
    this.b.show(b, nearB);
    this.drawn = "";
  }

  resize(size) {
    this.a.resize(size);
    this.b.resize(size);
    resizeCanvas(this.canvas, size);
  }

  // |A - B|, enlarged; only while both show the same frame.
  draw() {
    if (this.mode !== "difference") return;
    const [a, b] = [this.a.current, this.b.current];
    if (!a || !b || !hasPixels(a) || !hasPixels(b)) return;
    const frames = [a, b].map((each) => (each.matches("video") ? this.player.frameShown(each) : 0));
    const now = `${a.src} ${b.src} ${frames[0]} ${this.gain}`;
    if (frames[0] !== frames[1] || now === this.drawn) return;
    const [width, height] = [a.videoWidth || a.naturalWidth, a.videoHeight || a.naturalHeight];
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
    }
    const context = this.canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.globalCompositeOperation = "copy";
    context.drawImage(a, 0, 0, width, height);
    context.globalCompositeOperation = "difference";
    context.drawImage(b, 0, 0, width, height);
    context.globalCompositeOperation = "lighter";
    for (let factor = 1; factor < this.gain; factor *= 2) context.drawImage(this.canvas, 0, 0);
    this.drawn = now;
    this.canvas.dataset.frame = String(frames[0]);
  }

  close() {
    this.a.close();
    this.b.close();
  }
}

function hasPixels(element) {
  return element.matches("video") ? element.readyState >= 2 : element.complete && element.naturalWidth > 0;
}

// The pixels of a canvas are those of the video; only its box is enlarged.
function resizeCanvas(canvas, [width, height]) {
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
}
