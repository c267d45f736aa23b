/* The form of a new run: the browser's copy of its texts, marks of changes and problems, links to fields. */
(() => {
  const field = (path) => document.getElementById("f-" + path);
  const group = (path) => document.querySelector(".group.has-" + path.split(".")[0]);
  const place = (draft) => "nnx form " + draft;
  /* The draft, and its texts as they are now; `tab` is the id of this document, until the page is reloaded. */
  let form = { tab: Math.random().toString(36).slice(2), texts: {} };
  let latest = "", count = 0, restored = false, hurry = false, observed = null, marks = {};

  const written = (texts) => {
    form = { ...form, texts };
    latest = JSON.stringify({ ...form, count: ++count });
    if (form.draft) sessionStorage.setItem(place(form.draft), latest); // until it is saved: a reload brings it back
    return latest;
  };
  /* A group that gets other components takes no input until it has them; then the focus goes to `next`, if it is free. */
  const reshape = (path, next) => {
    const one = group(path), shape = () => one.querySelector(".shape")?.id, before = shape(), began = Date.now();
    const timer = setInterval(() => {
      if (shape() === before && Date.now() - began < 5000) return;
      clearInterval(timer);
      one.inert = false;
      if (document.activeElement === document.body) reach(next, false);
    }, 30);
    one.inert = hurry = true;
  };
  /* Focuses a field, or its nearest visible ancestor; opens the group that it is in. */
  const reach = (path, scrolls = true, tries = 100) => {
    const opener = group(path)?.querySelector(":scope > button:not(.open)");
    if (opener && tries === 100) opener.click();
    if (tries && (opener || (group(path) && !group(path).querySelector(".spec-field")))) {
      setTimeout(() => reach(path, scrolls, tries - 1), 100);
      return;
    }
    const names = path.split(".").map((_, at, all) => all.slice(0, all.length - at).join("."));
    const one = names.map((name) => field(name) ?? field(name + ".0")).find(Boolean);
    if (scrolls) one?.scrollIntoView({ block: "center" });
    const input = one?.querySelector("input, textarea") ?? one?.parentElement.querySelector("input, textarea, button");
    input?.focus({ preventScroll: true });
  };
  const marked = () => {
    const { changed = [], problems = {} } = marks;
    const set = (one, name, text) => { if (one.getAttribute(name) !== text) one.setAttribute(name, text); };
    for (const one of document.querySelectorAll(".spec-field")) {
      const path = one.id.slice(2), problem = problems[path] ?? "";
      set(one, "data-changed", String(changed.includes(path)));
      set(one, "data-problem", problem);
      for (const input of one.querySelectorAll("input, textarea"))
        for (const [name, text] of [["aria-invalid", "true"], ["aria-description", problem]])
          if (problem) set(input, name, text); else input.removeAttribute(name);
    }
    const wanted = decodeURIComponent(location.hash.slice(3));
    if (location.hash.startsWith("#f-") && observed !== wanted) { observed = wanted; reach(wanted); }
  };
  new MutationObserver(() => { if (marks.problems) marked(); })
    .observe(document.documentElement, { childList: true, subtree: true });

  Object.assign(nnx, {
    edit(path, value) {
      const text = Array.isArray(value) ? value.join(", ") : String(value ?? "");
      if (form.texts[path] === text) return latest;
      if (path.endsWith(".type")) reshape(path.slice(0, -5), path.slice(0, -5));
      return written({ ...form.texts, [path]: text });
    },
    add(path) {
      const size = Number(form.texts[path] || 0);
      reshape(path, path + "." + size);
      return written({ ...form.texts, [path]: String(size + 1) });
    },
    remove(path, index) {
      const texts = { [path]: String(form.texts[path] - 1) };
      for (const [name, text] of Object.entries(form.texts)) {
        const [at, ...rest] = name.startsWith(path + ".") ? name.slice(path.length + 1).split(".") : [-1];
        if (name === path || Number(at) === index) continue;
        texts[at > index ? [path, at - 1, ...rest].join(".") : name] = text;
      }
      reshape(path, path);
      return written(texts);
    },
    /* A draft was opened: what was typed before it came is kept, and what could not be saved comes back. */
    opened(text) {
      const first = JSON.parse(text || "{}"), kept = sessionStorage.getItem(place(first.draft)), earlier = form;
      const isOther = earlier.draft && earlier.draft !== first.draft;
      form = { ...form, ...first, texts: { ...first.texts, ...(isOther ? {} : earlier.texts) } };
      if (isOther) return (latest = "");
      if (earlier.draft || !(kept || Object.keys(earlier.texts).length)) return latest;
      restored = Boolean(kept);
      form = { ...form, ...JSON.parse(kept || "{}") };
      return written(form.texts);
    },
    /* The texts to save, once nothing was typed for a moment. */
    async settled() {
      if (!hurry) await new Promise((done) => setTimeout(done, 250));
      hurry = false;
      return [latest];
    },
    /* What was saved; a draft that another tab has changed goes on as a copy. */
    saved(text) {
      const { draft, from, saved } = JSON.parse(text || "{}");
      if (!draft) return;
      if (saved === count) sessionStorage.removeItem(place(from));
      if (draft !== new URLSearchParams(location.search).get("draft")) {
        form.draft = draft;
        nnx.set("draft", draft, "");
        nnx.set("copied", "1", "");
      }
      if (restored && saved === count) location.reload();
    },
    /* The groups that are unfolded, for the query. */
    unfolded(name, is) {
      const open = (new URLSearchParams(location.search).get("open") ?? "").split(",");
      return [...open.filter((one) => one && one !== name), ...(is ? [name] : [])].join(",");
    },
    mark(text) { marks = JSON.parse(text || "{}"); marked(); },
  });

  /* After one failed request gradio passes no event on until it reloads the page: what is typed then is written here. */
  document.addEventListener("input", ({ target: input }) => {
    const path = input.closest?.(".spec-field")?.id.slice(2);
    if (!path || !input.matches("input[type=text]:not([role]), input[type=number], textarea")) return;
    setTimeout(() => { if (form.draft && input.isConnected) nnx.edit(path, input.value); }, 500);
  }, true);
  document.addEventListener("click", (event) => {
    const path = event.target.closest?.('a[href^="#f-"]')?.getAttribute("href").slice(3);
    if (!path) return;
    event.preventDefault();
    event.stopPropagation();
    setTimeout(() => reach(decodeURIComponent(path)), 100); // a table takes the focus first
  }, true);
  /* Reads a file into the text box beside it. */
  document.addEventListener("change", async ({ target: input }) => {
    if (!input.matches?.("input.reads-text") || !input.files.length) return;
    const box = input.closest(".pastes").querySelector("textarea");
    box.value = (await input.files[0].slice(0, 1000000).text()).replaceAll("\r\n", "\n");
    box.dispatchEvent(new Event("input", { bubbles: true }));
  });
})();
