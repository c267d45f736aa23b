/* Navigation and requests: the URL determines the page, and requests are sent to the server through hidden buttons. */
(() => {
  const base = /*ROOT*/"";
  const below = (path) => (path.startsWith(base + "/") ? path.slice(base.length) : ""); // path below the app's root
  const pages = Object.fromEntries(Object.entries(/*PAGES*/{}).filter(([path]) => path === below(location.pathname)));
  const questions = {};
  const tab = Math.random().toString(36).slice(2); // id of this tab until it is reloaded
  let timer = null, lastTick = 0, inFlight = {};
  const nnx = (window.nnx ??= {});
  const current = () => pages[below(location.pathname)] || pages["/"];
  const root = () => document.getElementById("page-" + current().name);
  const button = (name) => document.getElementById("do-" + name.replace(".", "-"));

  const digests = (page) => {
    const found = {};
    document.querySelectorAll("#page-" + page + " .region[data-region]").forEach((one) => {
      if (one.dataset.page === undefined) found[one.dataset.region] = one.dataset.digest;
    });
    return found;
  };

  /* Calls an action of a page: nnx.send("run.stop", {id: "..."}) */
  nnx.send = (name, payload) => {
    const target = button(name);
    if (!target) return false;
    (questions[name] ??= []).push(JSON.stringify({ ...payload, tab, revision: root()?.querySelector("[data-revision]")?.dataset.revision, name: name, digests: digests(name.split(".")[0]) }));
    inFlight[name] = Date.now();
    target.click();
    return true;
  };
  nnx.take = (name) => [(questions[name] || []).shift() || "{}", location.search];

  nnx.effect = (text) => {
    let response = {};
    try { response = JSON.parse(text || "{}"); } catch { return; }
    if (response.name) delete inFlight[response.name];
    offline(false);
    if (response.query !== undefined) history.replaceState({}, "", location.pathname + (response.query ? "?" + response.query : ""));
    if (response.copy !== undefined) navigator.clipboard?.writeText(response.copy);
    if (response.goto) nnx.go(base + response.goto);
    requestAnimationFrame(settle);
  };

  /* Client-side updates: times in the local time zone, the page's title, fields with problems. */
  const settle = () => {
    document.querySelectorAll("time[datetime]:not([data-local])").forEach((one) => {
      one.dataset.local = "";
      const when = new Date(one.getAttribute("datetime"));
      if (!isNaN(when)) one.textContent = when.toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", ...(when.getFullYear() === new Date().getFullYear() ? {} : { year: "numeric" }) });
    });
    const titled = root()?.querySelector("[data-title]");
    document.title = (titled ? titled.dataset.title + " · " : "") + current().title + " · nnxdsl";
    document.dispatchEvent(new CustomEvent("nnx:settled"));
  };

  const show = (focus) => {
    const page = current();
    document.documentElement.dataset.page = page.name;
    document.querySelectorAll("header.top nav a").forEach((one) => {
      if (one.dataset.page === page.name) one.setAttribute("aria-current", "page"); else one.removeAttribute("aria-current");
    });
    nnx.send(page.name + ".open", {});
    settle();
    if (focus) setTimeout(() => {
      const heading = root()?.querySelector("h1");
      if (heading) { heading.tabIndex = -1; heading.focus({ preventScroll: true }); window.scrollTo(0, 0); }
    }, 120);
  };

  nnx.go = (url, replace) => {
    const to = new URL(url, location.href);
    if (to.origin !== location.origin) return;
    if (!(below(to.pathname) in pages)) return location.assign(to.href); // a page of gradio components
    const samePage = to.pathname === location.pathname;
    history[replace ? "replaceState" : "pushState"]({}, "", to.pathname + to.search + to.hash);
    show(!samePage);
  };

  /* Polls while an element on the page has data-tick and the tab is visible. */
  const beat = () => {
    timer = setTimeout(beat, 250);
    if (document.hidden || document.querySelector("dialog[open]")) return;
    const page = root();
    if (!page) return;
    const wanted = [...page.querySelectorAll("[data-tick]")].map((one) => parseFloat(one.dataset.tick)).filter((n) => n > 0);
    const name = current().name + ".tick";
    const waiting = inFlight[name] && Date.now() - inFlight[name] < 15000;
    if (inFlight[name] && Date.now() - inFlight[name] > 6000) offline(true);
    if (!wanted.length || waiting || Date.now() - lastTick < Math.min(...wanted) * 1000) return;
    lastTick = Date.now();
    const paused = [...page.querySelectorAll("[data-pause]")].filter((one) => one.checked).map((one) => one.dataset.pause);
    nnx.send(name, { paused: paused });
  };

  const offline = (is) => { const one = document.querySelector("header.top .offline"); if (one) one.hidden = !is; };

  const values = (form) => {
    const found = {};
    form.querySelectorAll("[name]").forEach((one) => {
      if (one.type === "checkbox") found[one.name] = one.checked ? "true" : "false";
      else if (one.type === "radio") { if (one.checked) found[one.name] = one.value; }
      else found[one.name] = one.value;
    });
    return found;
  };

  const toQuery = (form) => {
    const query = new URLSearchParams(location.search);
    form.querySelectorAll("[name]").forEach((one) => {
      const empty = one.type === "checkbox" ? !one.checked : one.value === "" || one.value === one.dataset.default;
      if (one.type === "radio" && !one.checked) return;
      if (empty) query.delete(one.name); else query.set(one.name, one.type === "checkbox" ? "1" : one.value);
    });
    nnx.go(location.pathname + (query.size ? "?" + query : ""), true);
  };

  /* Confirmation dialog; the promise resolves to whether it was confirmed. */
  const confirmed = (element) => new Promise((resolve) => {
    const text = element.dataset.confirm;
    let name = element.dataset.confirmName;
    if (element.dataset.confirmTicked !== undefined) {
      const ids = (new URLSearchParams(location.search).get("ids") || "").split(",").filter(Boolean);
      if (!ids.length) return resolve(true); // the server responds with what to tick
      name = ids.length === 1 ? ids[0] : ids.length + " runs";
    }
    if (text === undefined && name === undefined) return resolve(true);
    const dialog = document.createElement("dialog");
    dialog.className = "nnx-dialog";
    const body = document.createElement("form");
    body.method = "dialog";
    const sentence = document.createElement("p");
    sentence.textContent = text || "Are you sure?";
    body.append(sentence);
    let typed = null;
    if (name !== undefined) {
      const label = document.createElement("label");
      label.textContent = "Type " + name + " to confirm";
      typed = document.createElement("input");
      typed.type = "text"; typed.autocomplete = "off"; typed.spellcheck = false;
      label.append(typed);
      body.append(label);
    }
    const row = document.createElement("div");
    row.className = "row end";
    const no = document.createElement("button"), yes = document.createElement("button");
    no.textContent = "Cancel"; no.type = "button"; no.className = "button";
    yes.textContent = element.textContent; yes.type = "submit"; yes.value = "yes"; yes.className = "button danger";
    if (typed) { yes.disabled = true; typed.addEventListener("input", () => { yes.disabled = typed.value !== name; }); }
    no.addEventListener("click", () => dialog.close("no"));
    row.append(no, yes);
    body.append(row);
    dialog.append(body);
    dialog.addEventListener("close", () => { dialog.remove(); element.focus(); resolve(dialog.returnValue === "yes"); });
    document.body.append(dialog);
    dialog.showModal();
    (typed || no).focus();
  });

  const payloadOf = (element) => {
    const payload = { ...element.dataset };
    delete payload.do;
    const from = element.dataset.form ? document.getElementById(element.dataset.form) : element.closest("form[data-do]");
    if (from) payload.fields = values(from);
    const ticked = [...(root()?.querySelectorAll("input[data-tick-id]:checked") || [])].map((one) => one.dataset.tickId);
    if (ticked.length) payload.ticked = ticked;
    return payload;
  };

  let later = null;
  document.addEventListener("click", async (event) => {
    const element = event.target.closest("a[href], button[data-do], button[data-copy]");
    if (!element) return;
    if (element.matches("a[href]")) {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.button || element.target || element.hasAttribute("download")) return;
      const to = new URL(element.getAttribute("href"), location.href);
      if (to.origin !== location.origin || !(below(to.pathname) in pages)) return;
      event.preventDefault();
      if (to.hash && to.pathname + to.search === location.pathname + location.search) {
        const aim = document.getElementById(decodeURIComponent(to.hash.slice(1)));
        if (aim) { aim.closest("details")?.setAttribute("open", ""); aim.scrollIntoView({ block: "center" }); aim.focus(); }
        return;
      }
      nnx.go(to.href);
      return;
    }
    event.preventDefault();
    if (element.dataset.copy !== undefined) {
      const source = element.dataset.copy ? document.getElementById(element.dataset.copy) : null;
      const text = source ? source.value ?? source.textContent : element.dataset.text || "";
      try { await navigator.clipboard.writeText(text); element.dataset.said = "copied"; } catch { element.dataset.said = "could not copy"; }
      setTimeout(() => delete element.dataset.said, 1500);
      return;
    }
    if (!(await confirmed(element))) return;
    if (element.dataset.form) clearTimeout(later); // these fields are sent now, and the response may replace their form
    nnx.send(element.dataset.do, payloadOf(element));
  });

  document.addEventListener("submit", (event) => {
    const form = event.target.closest("form");
    if (!form || form.method === "dialog") return;
    event.preventDefault();
    if (form.dataset.query !== undefined) toQuery(form);
    else if (form.dataset.do) nnx.send(form.dataset.do, { ...form.dataset, fields: values(form) });
  });

  const changed = (event) => {
    const form = event.target.closest?.("form");
    if (!form) return;
    const wait = event.type === "change" ? 0 : 300;
    if (form.dataset.query !== undefined) {
      clearTimeout(later);
      later = setTimeout(() => toQuery(form), wait);
    } else if (form.dataset.live !== undefined && form.dataset.do) {
      const name = event.target.dataset.do || form.dataset.do;
      clearTimeout(later);
      later = setTimeout(() => nnx.send(name, { ...form.dataset, changed: event.target.name, fields: values(form) }), wait);
    }
  };
  document.addEventListener("input", changed);
  document.addEventListener("change", (event) => { if (event.target.matches?.("select, input[type=checkbox], input[type=radio]")) changed(event); });

  /* A response has the field's text at the time of the request: text typed since then is kept, with the cursor. */
  let typed = null;
  document.addEventListener("input", (event) => {
    const one = event.target;
    if (one.matches?.("form[data-query] input, form[data-live] input")) typed = { one, name: one.name, text: one.value, at: one.selectionStart };
  }, true);
  document.addEventListener("selectionchange", () => { if (typed && typed.one.value === typed.text) typed.at = typed.one.selectionStart; });
  new MutationObserver(() => {
    if (!typed || typed.one !== document.activeElement || typed.one.name !== typed.name || typed.one.value === typed.text) return;
    typed.one.value = typed.text;
    typed.one.setSelectionRange(typed.at, typed.at);
  }).observe(document.documentElement, { attributes: true, attributeFilter: ["value"], subtree: true });

  window.addEventListener("popstate", () => show(true));

  if (!(below(location.pathname) in pages)) return;
  const start = () => {
    if (!button(current().name + ".open")) return requestAnimationFrame(start);
    show(false);
    if (!timer) beat();
  };
  document.documentElement.lang = "en";
  document.documentElement.dataset.page = current().name;
  requestAnimationFrame(start);
})();
