/* The form of a new run: the browser's copy of its texts, marks of changes and problems, links to fields. */
(() => {
  const tab = Math.random().toString(36).slice(2); // id of this document, until the page is reloaded
  const place = (draft) => "nnx form " + draft;
  const text = (value) => (Array.isArray(value) ? value.join(", ") : String(value ?? ""));
  const field = (path) => document.getElementById("f-" + path);
  let latest = "", count = 0, restored = false, marks = {}, hurry = false, observed = null, shown = {};

  /* Texts as they are now: those of the draft when it was opened, and on top of them all that was changed since. */
  const merged = (origin, form) => {
    const first = JSON.parse(origin || "{}"), now = JSON.parse(form || "{}");
    return { tab, ...now, ...first, texts: now.draft ? now.texts : { ...first.texts, ...now.texts } };
  };
  const written = (form) => {
    latest = JSON.stringify({ ...form, count: ++count });
    shown = form;
    if (form.draft) sessionStorage.setItem(place(form.draft), latest); // until it is saved: a reload brings it back
    return latest;
  };
  /* A group that gets other components takes no input until it has them; then the focus goes to `next`, if it is free. */
  const reshape = (path, next) => {
    const group = document.querySelector(".group.has-" + path.split(".")[0]), began = Date.now();
    const shape = () => group.querySelector(".shape")?.id, before = shape();
    const timer = setInterval(() => {
      if (shape() === before && Date.now() - began < 5000) return;
      clearInterval(timer);
      group.inert = false;
      if (document.activeElement === document.body) reach(next, false);
    }, 30);
    group.inert = hurry = true;
  };

  Object.assign(nnx, {
    /* A changed field. */
    edit(path, value, origin, form) {
      const now = merged(origin, form);
      if (now.texts[path] === text(value)) return form;
      now.texts[path] = text(value);
      if (path.endsWith(".type")) reshape(path.slice(0, -5), path.slice(0, -5));
      return written(now);
    },
    add(path, origin, form) {
      const now = merged(origin, form), size = Number(now.texts[path] || 0);
      now.texts[path] = String(size + 1);
      reshape(path, path + "." + size);
      return written(now);
    },
    remove(path, index, origin, form) {
      const now = merged(origin, form), texts = { [path]: String(Number(now.texts[path]) - 1) };
      for (const [name, each] of Object.entries(now.texts)) {
        const [at, ...rest] = name.startsWith(path + ".") ? name.slice(path.length + 1).split(".") : ["-1"];
        if (name === path || Number(at) === index) continue;
        texts[Number(at) > index ? [path, at - 1, ...rest].join(".") : name] = each;
      }
      reshape(path, path);
      return written({ ...now, texts });
    },
    /* The draft was opened: what was typed before it could be saved comes back. */
    opened(origin, form) {
      const first = JSON.parse(origin || "{}"), kept = sessionStorage.getItem(place(first.draft));
      shown = merged(origin, form);
      if (!form && kept) { restored = true; return written(JSON.parse(kept)); }
      return form && !JSON.parse(form).draft ? written(merged(origin, form)) : form;
    },
    /* The texts to save, once nothing was typed for a moment. */
    async settled() {
      if (!hurry) await new Promise((done) => setTimeout(done, 250));
      hurry = false;
      return [latest];
    },
    saved(result) {
      const { draft, from, saved } = JSON.parse(result || "{}");
      if (!draft) return;
      if (saved === count) sessionStorage.removeItem(place(from));
      if (draft !== new URLSearchParams(location.search).get("draft")) {
        nnx.set("draft", draft, "");
        nnx.set("copied", "1", "");
      }
      if (restored && saved === count) location.reload();
    },
    /* The groups that were unfolded, for the query. */
    unfolded(name, is) {
      const open = new Set((new URLSearchParams(location.search).get("open") ?? "").split(",").filter(Boolean));
      if (is) open.add(name); else open.delete(name);
      return [...open].join(",");
    },
    mark(given) { marks = JSON.parse(given || "{}"); marked(); },
  });

  const marked = () => {
    const { changed = [], problems = {} } = marks, differs = new Set(changed);
    document.querySelectorAll(".spec-field").forEach((one) => {
      const path = one.id.slice(2), problem = problems[path] ?? "";
      if (one.dataset.changed !== String(differs.has(path))) one.dataset.changed = String(differs.has(path));
      if (one.dataset.problem !== problem) one.dataset.problem = problem;
      one.querySelectorAll("input, textarea").forEach((input) => {
        if (problem) input.setAttribute("aria-invalid", "true"); else input.removeAttribute("aria-invalid");
        if (problem) input.setAttribute("aria-description", problem); else input.removeAttribute("aria-description");
      });
    });
    const wanted = decodeURIComponent(location.hash.slice(3));
    if (location.hash.startsWith("#f-") && observed !== wanted) { observed = wanted; reach(wanted); }
  };

  /* Focuses a field, or its nearest visible ancestor; opens the group that it is in. */
  const reach = (path, scrolls = true, tries = 100) => {
    const group = document.querySelector(".group.has-" + path.split(".")[0]), opener = group?.querySelector(":scope > button:not(.open)");
    if (opener && tries === 100) opener.click();
    if (tries && (opener || (group && !group.querySelector(".spec-field")))) { setTimeout(() => reach(path, scrolls, tries - 1), 100); return; }
    for (let name = path; name; name = name.includes(".") ? name.slice(0, name.lastIndexOf(".")) : "") {
      const one = field(name) ?? field(name + ".0");
      if (!one) continue;
      if (scrolls) one.scrollIntoView({ block: "center" });
      (one.querySelector("input, textarea") ?? one.parentElement.querySelector("input, textarea, button"))?.focus({ preventScroll: true });
      return;
    }
  };

  /* After one failed request gradio passes no event on until it reloads the page: what is typed then is written here. */
  document.addEventListener("input", (event) => {
    const input = event.target, path = input.closest?.(".spec-field")?.id.slice(2);
    if (!path || !input.matches("input[type=text]:not([role]), input[type=number], textarea")) return;
    setTimeout(() => {
      if (!shown.draft || !input.isConnected || shown.texts[path] === input.value) return;
      written({ ...shown, texts: { ...shown.texts, [path]: input.value } });
    }, 500);
  }, true);

  document.addEventListener("click", (event) => {
    const path = event.target.closest?.('a[href^="#f-"]')?.getAttribute("href").slice(3);
    if (path) { event.preventDefault(); event.stopPropagation(); setTimeout(() => reach(decodeURIComponent(path)), 100); /* a table takes the focus first */ }
  }, true);

  /* Reads a file into the text box beside it. */
  document.addEventListener("change", async (event) => {
    if (!event.target.matches?.("input.reads-text") || !event.target.files.length) return;
    const box = event.target.closest(".pastes").querySelector("textarea");
    box.value = (await event.target.files[0].slice(0, 1000000).text()).replaceAll("\r\n", "\n");
    box.dispatchEvent(new Event("input", { bubbles: true }));
  });

  new MutationObserver(() => { if (marks.problems) marked(); }).observe(document.documentElement, { childList: true, subtree: true });
})();
