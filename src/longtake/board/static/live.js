// What is new of a run: one stream of events a page, closed while the page is hidden.

const listeners = new Set();

// Calls back with each new state of the run: see server.live.
export function onLive(listener) {
  listeners.add(listener);
}

export function startLive() {
  const element = document.querySelector("[data-live]");
  const url = element ? element.dataset.live : "";
  if (!url) return;
  onLive((now) => showStatus(element, now));
  followEvents(url, (now) => { for (const listener of listeners) listener(now); });
}

// Calls back with what a stream of events says; it is closed while the page is hidden.
export function followEvents(url, listener) {
  let source = null;
  const connect = () => {
    if (document.hidden) {
      if (source) source.close();
      source = null;
    } else if (!source) {
      source = new EventSource(url);
      source.onmessage = (message) => listener(JSON.parse(message.data));
    }
  };
  document.addEventListener("visibilitychange", connect);
  connect();
}

function showStatus(element, now) {
  if (!now.line) return;
  for (const field of element.querySelectorAll("[data-field]")) {
    const key = field.dataset.field;
    if (key === "state") {
      field.className = `state state-${now.state || "unknown"}`;
      field.textContent = now.line.state;
    } else {
      field.textContent = now.line[key] || "";
    }
  }
}
