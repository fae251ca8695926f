// The data page: which verdict is open stands in the URL.
import { setParameters } from "./page.js";

export function startDataPage() {
  const verdicts = [...document.querySelectorAll("details[data-step]")];
  for (const each of verdicts) {
    each.addEventListener("toggle", () => {
      const open = verdicts.find((other) => other.open);
      if (each.open) setParameters({ step: each.dataset.step });
      else setParameters({ step: open ? open.dataset.step : null });
    });
  }
  const shown = verdicts.find((each) => each.open);
  if (shown && !location.hash) shown.scrollIntoView({ block: "center" });
}
