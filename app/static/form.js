/* The form of a new run: marks changed and invalid fields, and keeps open groups open. */
(() => {
  const open = {};
  const base = (one) => one.dataset.base ?? "";
  const value = (one) => (one.type === "checkbox" ? (one.checked ? "true" : "false") : one.value);

  const mark = (one) => {
    const field = one.closest(".field");
    if (field && one.dataset.base !== undefined) field.classList.toggle("changed", value(one) !== base(one));
  };
  document.addEventListener("input", (event) => { if (event.target.closest?.(".spec-form")) mark(event.target); });

  document.addEventListener("change", (event) => {
    if (event.target.id === "only-changed") document.documentElement.classList.toggle("only-changed", event.target.checked);
    if (event.target.dataset?.tickId !== undefined) {
      const query = new URLSearchParams(location.search);
      const ids = new Set((query.get("ids") || "").split(",").filter(Boolean));
      if (event.target.checked) ids.add(event.target.dataset.tickId); else ids.delete(event.target.dataset.tickId);
      if (ids.size) query.set("ids", [...ids].join(",")); else query.delete("ids");
      history.replaceState({}, "", location.pathname + (query.size ? "?" + query : ""));
    }
  });

  /* Reads a file into a text field; the server parses it on submit. */
  document.addEventListener("change", async (event) => {
    const aim = document.getElementById(event.target.dataset?.reads || "");
    if (!aim || !event.target.files?.length) return;
    aim.value = (await event.target.files[0].slice(0, 1000000).text()).replaceAll("\r\n", "\n");
    aim.focus();
  });

  document.addEventListener("toggle", (event) => { if (event.target.id) open[event.target.id] = event.target.open; }, true);

  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[data-field]");
    if (!link) return;
    event.preventDefault();
    event.stopPropagation();
    reach(link.dataset.field);
  }, true);

  /* Focuses a field, or its nearest visible ancestor. */
  const reach = (path) => {
    for (let name = path; name; name = name.includes(".") ? name.slice(0, name.lastIndexOf(".")) : "") {
      const one = document.getElementById("f-" + name);
      if (!one) continue;
      for (let parent = one.closest("details"); parent; parent = parent.parentElement.closest("details")) parent.open = true;
      one.scrollIntoView({ block: "center" });
      one.focus();
      return;
    }
  };

  let reached = "";
  document.addEventListener("nnx:settled", () => {
    for (const [id, is] of Object.entries(open)) {
      const one = document.getElementById(id);
      if (one && one.tagName === "DETAILS" && one.open !== is) one.open = is;
    }
    const toggle = document.getElementById("only-changed");
    if (toggle) toggle.checked = document.documentElement.classList.contains("only-changed");
    const panel = document.querySelector("#page-new [data-problems]");
    if (!panel) return;
    const problems = JSON.parse(panel.dataset.problems);
    document.querySelectorAll("#page-new .field-problem").forEach((one) => {
      const path = one.id.slice(2), input = document.getElementById("f-" + path);
      one.textContent = problems[path] || "";
      one.hidden = !problems[path];
      if (input) { if (problems[path]) input.setAttribute("aria-invalid", "true"); else input.removeAttribute("aria-invalid"); }
    });
    const wanted = decodeURIComponent(location.hash.slice(3));
    if (location.hash.startsWith("#f-") && wanted !== reached && document.getElementById("f-" + wanted)) { reached = wanted; reach(wanted); }
  });
})();
