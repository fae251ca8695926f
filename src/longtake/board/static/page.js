// What all pages share: state in the URL, embedded JSON, copyable commands, elements.

// The JSON of a <script type="application/json"> by its id; null: the page has none.
export function embedded(id) {
  const element = document.getElementById(id);
  return element ? JSON.parse(element.textContent) : null;
}

export function parameter(name) {
  return new URLSearchParams(location.search).get(name);
}

// Changes parameters of the URL, so that a link shows what is seen; null removes one.
export function setParameters(values) {
  const all = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === "") all.delete(name);
    else all.set(name, value);
  }
  const query = all.toString();
  try {
    history.replaceState(null, "", location.pathname + (query ? `?${query}` : "") + location.hash);
  } catch {
    // A page that was opened from a file cannot change its address.
  }
}

// An element with attributes and children; text is never parsed as HTML.
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// Whether a key is typed into a field, and is no command.
export function isTyping(event) {
  const target = event.target;
  return event.ctrlKey || event.metaKey || event.altKey
    || (target instanceof HTMLElement && target.matches("input:not([type=range]):not([type=checkbox]), select, textarea"));
}

export function startCopying() {
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      await copyText(button.dataset.copy);
      const label = button.textContent;
      button.textContent = "copied";
      setTimeout(() => { button.textContent = label; }, 1200);
    });
  }
}

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Pages over plain HTTP from another host have no clipboard of their own.
  const field = make("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
