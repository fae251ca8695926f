// Where the board needs a token: takes it from the part of the address after "#", which is not sent.

export function startToken() {
  const section = document.querySelector("[data-cookie]");
  if (!section) return;
  const cookie = section.dataset.cookie;
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  const open = (token) => {
    document.cookie = `${cookie}=${encodeURIComponent(token)}; path=/; samesite=strict; max-age=2592000`;
    history.replaceState(null, "", location.pathname + location.search);
    location.reload();
  };
  if (given) {
    open(given);
    return;
  }
  section.querySelector("[role=alert]").hidden = !document.cookie.includes(`${cookie}=`);
  const field = section.querySelector("input");
  section.querySelector("button").addEventListener("click", () => open(field.value));
  field.addEventListener("keydown", (event) => { if (event.key === "Enter") open(field.value); });
}
