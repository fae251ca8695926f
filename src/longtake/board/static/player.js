// Plays short videos in step: one clock, which all videos that are seen follow.

const MOST_LOADED_UNSEEN = 48;
const SEEK_PAUSE_MS = 300;
const LONGEST_SEEK_PAUSE_MS = 4000;
const JUDGED_MS = 700;
const LOADING_MS = 1500;
const LEAST_RATE = 0.07;
const LONGEST_TICK_MS = 250;
const MOST_NUDGE = 0.12;

export class Player {
  constructor(fps, frames) {
    this.fps = fps;
    this.frames = frames;
    this.time = 0.5 / fps;
    this.rate = 1;
    this.pace = 1;
    this.judgedAt = 0;
    this.isPlaying = false;
    this.hasPlayed = false;
    this.known = new Map();
    this.listeners = new Set();
    this.observer = new IntersectionObserver((entries) => {
      for (const each of entries) this.see(each.target, each.isIntersecting);
    }, { rootMargin: "60px" });
    this.tick = this.tick.bind(this);
  }

  // Calls back when another frame is to be seen, or is seen.
  onChange(listener) {
    this.listeners.add(listener);
  }

  get length() {
    return Math.max(1, this.frames) / this.fps;
  }

  // From 0.
  get frame() {
    return Math.min(Math.max(0, this.frames - 1), Math.floor(this.time * this.fps + 1e-6));
  }

  add(video, isSeen = false) {
    if (this.known.has(video)) return;
    const state = { isSeen, seekedAt: -Infinity, patience: SEEK_PAUSE_MS, shown: null, source: video.getAttribute("src"), isStarting: false };
    this.known.set(video, state);
    state.onLoaded = () => {
      if (!this.frames && Number.isFinite(video.duration)) this.frames = Math.max(1, Math.round(video.duration * this.fps));
      this.follow(video, state);
      this.say();
    };
    state.onSeeked = () => {
      if (!this.isPlaying) this.follow(video, state);
      this.say();
    };
    video.addEventListener("loadeddata", state.onLoaded);
    video.addEventListener("seeked", state.onSeeked);
    this.observer.observe(video);
    if (video.requestVideoFrameCallback) {
      const note = (now, metadata) => {
        state.shown = metadata.mediaTime;
        this.say();
        if (this.known.get(video) === state) video.requestVideoFrameCallback(note);
      };
      video.requestVideoFrameCallback(note);
    }
    if (isSeen) this.follow(video, state);
  }

  remove(video) {
    const state = this.known.get(video);
    if (!state) return;
    video.removeEventListener("loadeddata", state.onLoaded);
    video.removeEventListener("seeked", state.onSeeked);
    this.observer.unobserve(video);
    this.known.delete(video);
    video.pause();
  }

  // The number of the frame that a video shows, from 0; null: none yet.
  frameShown(video) {
    const state = this.known.get(video);
    if (!state || video.readyState < 2) return null;
    const time = state.shown === null ? video.currentTime - 0.5 / this.fps : state.shown;
    return Math.round(time * this.fps);
  }

  see(video, isSeen) {
    const state = this.known.get(video);
    if (!state) return;
    state.isSeen = isSeen;
    if (isSeen) {
      if (video.dataset.poster && !video.poster) video.poster = video.dataset.poster;
      if (this.hasPlayed) this.load(video, state);
    } else {
      video.pause();
      this.release();
    }
  }

  load(video, state) {
    if (!video.getAttribute("src")) video.src = state.source;
    video.preload = "auto";
    this.follow(video, state);
  }

  // A browser plays a limited number of videos: those that were passed lose what they have loaded.
  release() {
    const unseen = [...this.known].filter(([video, state]) => !state.isSeen && video.readyState > 0);
    for (const [video, state] of unseen.slice(0, Math.max(0, unseen.length - MOST_LOADED_UNSEEN))) {
      video.removeAttribute("src");
      video.preload = "none";
      video.load();
      state.shown = null;
    }
  }

  play() {
    if (this.isPlaying) return;
    this.isPlaying = true;
    this.last = performance.now();
    this.judgedAt = this.last + LOADING_MS;
    this.loadSeen();
    requestAnimationFrame(this.tick);
    this.say();
  }

  pause() {
    this.isPlaying = false;
    this.time = (this.frame + 0.5) / this.fps;
    this.followAll(true);
    this.say();
  }

  toggle() {
    if (this.isPlaying) this.pause();
    else this.play();
  }

  setRate(rate) {
    this.rate = rate;
    this.pace = 1;
    this.say();
  }

  // The speed at which videos play: less than was asked for where they cannot be decoded so fast.
  get speed() {
    return Math.max(LEAST_RATE, this.rate * this.pace);
  }

  // Many large videos may be too much for a machine: they are then all slower, but in step.
  judge(now) {
    if (now - this.judgedAt < JUDGED_MS) return;
    this.judgedAt = now;
    const ready = [...this.known].filter(([video, state]) => state.isSeen && video.readyState > 0);
    if (ready.length < 2) return;
    const late = ready.filter(([video]) => video.readyState < 2 || Math.abs(this.off(video)) > 1 / this.fps);
    if (late.length > 0.2 * ready.length) this.pace = Math.max(0.1, this.pace * 0.7);
    else if (late.length < 0.05 * ready.length) this.pace = Math.min(1, this.pace * 1.08);
  }

  // By how many seconds a video is behind the clock.
  off(video) {
    const off = this.target(video) - video.currentTime;
    return off - this.length * Math.round(off / this.length);
  }

  // Stops at a frame.
  seek(frame) {
    this.time = (Math.min(Math.max(0, frame), Math.max(0, this.frames - 1)) + 0.5) / this.fps;
    this.loadSeen();
    this.pause();
  }

  loadSeen() {
    this.hasPlayed = true;
    for (const [video, state] of this.known) if (state.isSeen) this.load(video, state);
  }

  tick(now) {
    if (!this.isPlaying) return;
    const passed = Math.min(LONGEST_TICK_MS, Math.max(0, now - this.last));
    this.last = now;
    const frame = this.frame;
    this.time += (passed / 1000) * this.speed;
    const isNewRound = this.time >= this.length;
    if (isNewRound) this.time %= this.length;
    this.followAll(isNewRound && this.pace === 1);
    this.judge(now);
    if (isNewRound || frame !== this.frame) this.say();
    requestAnimationFrame(this.tick);
  }

  followAll(isAtOnce) {
    for (const [video, state] of this.known) this.follow(video, state, isAtOnce);
  }

  // Where a video should be; a shorter one waits at its last frame.
  target(video) {
    return Math.max(0, Math.min(this.time, (video.duration || this.length) - 0.5 / this.fps));
  }

  follow(video, state, isAtOnce = false) {
    if (!state.isSeen || video.readyState < 2) return;
    const target = this.target(video);
    const isWaiting = !this.isPlaying || this.time > video.duration;
    if (isWaiting) {
      if (!video.paused) video.pause();
      if (Math.abs(video.currentTime - target) > 0.2 / this.fps && !video.seeking) video.currentTime = target;
      return;
    }
    const off = this.off(video);
    // What is less than half a frame is made up for by a slightly other speed.
    const nudge = Math.round(Math.min(MOST_NUDGE, Math.max(-MOST_NUDGE, 2 * off)) * 25) / 25;
    const rate = Math.max(LEAST_RATE, this.speed * (1 + nudge));
    if (video.playbackRate !== rate) video.playbackRate = rate;
    const since = performance.now() - state.seekedAt;
    if (Math.abs(off) > 0.5 / this.fps && (isAtOnce || since > state.patience) && !video.seeking) {
      video.currentTime = target;
      state.seekedAt = performance.now();
      // Seeking is dear: a video that is late again and again is moved less often.
      state.patience = since < 2 * state.patience ? Math.min(LONGEST_SEEK_PAUSE_MS, 2 * state.patience) : SEEK_PAUSE_MS;
    }
    if (video.paused && !state.isStarting) {
      state.isStarting = true;
      video.play().catch(() => {}).finally(() => { state.isStarting = false; });
    }
  }

  say() {
    for (const listener of this.listeners) listener();
  }
}
