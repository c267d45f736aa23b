/* Of every page: what is chosen is in the query of the URL. */
Object.assign(nnx, {
  count: 0, changed: "",
  set(name, value, initial) { // writes a choice into the query; returns what changed last: a choice may be told twice
    const query = new URLSearchParams(location.search);
    const text = value === true ? "1" : value === false ? "" : String(value ?? "");
    if (text === (query.get(name) ?? initial)) return nnx.changed;
    if (text === "" || text === initial) query.delete(name); else query.set(name, text);
    history.replaceState({}, "", location.pathname + (query.size ? "?" + query : "") + location.hash);
    return (nnx.changed = JSON.stringify({ name, count: ++nnx.count }));
  },
  done(text) { // follows an action: opens another page, or writes into the query; returns what changed
    const { query, goto } = JSON.parse(text || "{}");
    if (goto) location.assign(nnx.root + goto);
    for (const [name, value] of Object.entries(query || {})) nnx.set(name, value, "");
    return (nnx.changed = JSON.stringify({ count: ++nnx.count }));
  },
  query() { // with the width of the window and its time zone; a run of the query is in the window's title
    const query = new URLSearchParams(location.search), page = nnx.titles[location.pathname.slice(nnx.root.length)];
    if (page) document.title = [query.get("id"), page, "nnxdsl"].filter(Boolean).join(" · ");
    query.set("_width", innerWidth);
    query.set("_zone", Intl.DateTimeFormat().resolvedOptions().timeZone || "");
    return "?" + query;
  },
});
for (const kind of ["pointerdown", "keydown"]) addEventListener(kind, () => { nnx.isUsed = true; }, true);
/* Markdown opens every link in another tab; those to pages of the app are below its root, and open in this one. */
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]"), path = link?.getAttribute("href") ?? "";
  if (!link || link.origin !== location.origin) return;
  link.removeAttribute("target");
  if (path.startsWith("#f-")) event.preventDefault();
  if (path.startsWith("#f-")) setTimeout(nnx.reach, 100, decodeURIComponent(path.slice(3))); // a table takes the focus first
  if (path.startsWith("/") && !path.startsWith(nnx.root + "/")) link.href = nnx.root + path;
}, true);
new MutationObserver(() => {
  for (const input of document.querySelectorAll("input[title]:not([aria-label])")) input.ariaLabel = input.title; // of tables
  nnx.mark();
}).observe(document, { childList: true, subtree: true });
