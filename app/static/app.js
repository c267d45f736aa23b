/* Of every page: what is chosen is in the query of the URL. */
Object.assign(nnx, {
  count: 0,
  changed: "",
  /* Writes a choice into the query of the URL; returns what changed last: a choice may be told twice. */
  set(name, value, initial) {
    const query = new URLSearchParams(location.search), was = query.get(name) ?? initial;
    const plain = value === true ? "1" : value === false ? "" : String(value ?? "");
    const text = Array.isArray(value) ? value.join(",") : plain;
    if (text === was) return nnx.changed;
    if (text === "" || text === initial) query.delete(name); else query.set(name, text);
    history.replaceState({}, "", location.pathname + (query.size ? "?" + query : ""));
    return (nnx.changed = JSON.stringify({ name, count: ++nnx.count }));
  },
  /* Follows an action: opens another page, or writes into the query; returns what changed. */
  done(text) {
    const { query, goto } = JSON.parse(text || "{}");
    if (goto) location.assign(nnx.root + goto);
    for (const [name, value] of Object.entries(query || {})) nnx.set(name, value, "");
    return (nnx.changed = JSON.stringify({ count: ++nnx.count }));
  },
  /* The query of the URL, the width of the window, and its time zone; a run of the query is in the window's title. */
  query() {
    const page = nnx.titles[location.pathname.slice(nnx.root.length)];
    const run = new URLSearchParams(location.search).get("id");
    if (page) document.title = [run, page, "nnxdsl"].filter(Boolean).join(" · ");
    const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || "";
    return location.search + (location.search ? "&" : "?") + new URLSearchParams({ _width: innerWidth, _zone: zone });
  },
});
for (const kind of ["pointerdown", "keydown"]) addEventListener(kind, () => { nnx.isUsed = true; }, true);
/* Markdown opens every link in another tab; those to pages of the app are below its root, and open in this one. */
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]"), path = link?.getAttribute("href") ?? "";
  if (!link || link.origin !== location.origin) return;
  link.removeAttribute("target");
  if (path.startsWith("/") && !path.startsWith(nnx.root + "/")) link.href = nnx.root + path;
}, true);
/* The filter of a table has a title only, which not every screen reader says. */
new MutationObserver(() => {
  for (const input of document.querySelectorAll("input[title]:not([aria-label])")) input.ariaLabel = input.title;
}).observe(document, { childList: true, subtree: true });
