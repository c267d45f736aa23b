(() => { // The form of a new run: the browser's copy of its texts, marks of changes and problems, links to fields.
  /* The draft and its texts as they are now; `tab` is the id of this document, until the page is reloaded. */
  let form = { tab: Math.random().toString(36).slice(2), count: 0, texts: {} }, latest = "", kept = "", marks = null;
  const written = (texts) => {
    form = { ...form, texts, count: form.count + 1 };
    latest = JSON.stringify(form);
    if (form.draft) sessionStorage["form " + form.draft] = latest; // until it is saved: a reload brings it back
    return latest;
  };
  const group = (path) => document.querySelector(".group.has-" + path.split(".")[0]);
  /* Focuses a field, or its nearest ancestor, once its group is drawn; if not as `old`, the group takes no input until then. */
  const reach = (path, old = "", tries = 100) => {
    const shape = group(path)?.querySelector(".shape:has(.spec-field)"), isOld = old && shape?.id === old;
    const opener = group(path)?.querySelector(":scope > button:not(.open)");
    if (tries === 100 && !old) opener?.click();
    if (shape) shape.inert = tries && isOld;
    if (tries && (opener || !shape || isOld)) return setTimeout(reach, 100, path, old, tries - 1);
    const found = [...document.querySelectorAll(".spec-field")].findLast(({ id }) => `${path}.0.`.startsWith(id.slice(2) + "."));
    const input = [found, found?.parentElement].map((one) => one?.querySelector("input, textarea, button")).find(Boolean);
    if (!old || document.activeElement === document.body) input?.focus();
  };
  const reshape = (next) => reach(next, group(next).querySelector(".shape").id);
  Object.assign(nnx, {
    reach,
    add: (path, count) => nnx.edit(path, count + 1, `${path}.${count}`),
    edit(path, value, next) { // `next` is to be focused if other components come
      const text = String(value ?? "");
      if (form.texts[path] === text) return latest;
      if (next) reshape(next);
      return written({ ...form.texts, [path]: text });
    },
    remove(path, index) {
      const at = (name) => (name.startsWith(path + ".") ? parseInt(name.slice(path.length + 1)) : -1);
      const moved = (name) => (at(name) > index ? name.replace(`${path}.${at(name)}`, `${path}.${at(name) - 1}`) : name);
      const left = Object.entries(form.texts).filter(([name]) => at(name) !== index);
      reshape(path);
      return written({ ...Object.fromEntries(left.map(([name, text]) => [moved(name), text])), [path]: String(form.texts[path] - 1) });
    },
    opened(text) { // a draft; what could not be saved of it comes back
      const first = JSON.parse(text || "{}");
      if (form.draft && form.draft === first.draft) return latest; // the copy that it goes on as
      kept = form.draft ? "" : sessionStorage["form " + first.draft];
      form = { ...form, ...first, ...JSON.parse(kept || "{}") };
      if (location.hash) reach(decodeURIComponent(location.hash.slice(3))); // of a link #f-PATH
      return kept ? written(form.texts) : (latest = "");
    },
    settled: () => new Promise((done) => setTimeout(() => done([latest]), 250)), // once nothing is typed for a moment
    saved(text) { // the draft is another one if another tab has changed the one that was shown
      const { draft, from, count } = JSON.parse(text || "{}"), isLatest = draft && form.count === count;
      if (draft && form.draft === from) form.draft = draft;
      if (isLatest) delete sessionStorage["form " + from];
      if (isLatest && kept) location.reload(); // fields show what came back
      nnx.done(text);
    },
    mark(text) {
      if (text) marks = JSON.parse(text);
      for (const one of marks ? document.querySelectorAll(".spec-field") : []) {
        const path = one.id.slice(2), problem = marks.problems[path] ?? "";
        Object.assign(one.dataset, { changed: marks.changed.includes(path), problem });
        for (const input of one.querySelectorAll("input, textarea"))
          Object.assign(input, { ariaInvalid: problem ? "true" : null, ariaDescription: problem || null });
      }
    },
  });
  document.addEventListener("click", ({ target }) => target.closest?.(".group .info-text")?.classList.toggle("unfolded"));
  /* After one failed request gradio passes no event on until it reloads the page: what is typed then is written here. */
  document.addEventListener("input", ({ target: input }) => {
    const isText = input.matches?.(".spec-field :is(input[type=text]:not([role]), input[type=number], textarea)");
    if (isText) nnx.edit(input.closest(".spec-field").id.slice(2), input.value);
  }, true);
})();
