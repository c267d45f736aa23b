/* The tokens of a text: the chosen one, and the most likely alternatives of both models. */
(() => {
  const make = (name, text, cls) => {
    const one = document.createElement(name);
    if (text !== undefined) one.textContent = text;
    if (cls) one.className = cls;
    return one;
  };

  const table = (title, rows, said, other) => {
    const whole = make("table"), head = make("tr"), body = make("tbody");
    whole.append(make("caption", title));
    for (const name of ["token", "policy", other]) { const cell = make("th", name, name === "token" ? "" : "num"); cell.scope = "col"; head.append(cell); }
    const top = make("thead");
    top.append(head);
    for (const [text, mine, theirs] of rows) {
      const row = make("tr", undefined, text === said ? "said" : "");
      row.append(make("td", text === said ? text + "  ✓ said" : text), make("td", mine, "num"), make("td", theirs, "num"));
      body.append(row);
    }
    whole.append(top, body);
    return whole;
  };

  const show = (token) => {
    const target = document.getElementById("token-detail");
    if (!target) return;
    const data = JSON.parse(token.dataset.token), other = target.closest("[data-other]").dataset.other;
    token.closest(".region").querySelectorAll(".token[data-token]").forEach((one) => {
      one.setAttribute("aria-pressed", one === token ? "true" : "false");
    });
    const [mine, theirs] = data.lp.map(Number);
    const line = make("p");
    line.append(make("code", data.text), document.createTextNode(
      " (token " + data.n + "): policy " + data.lp[0] + ", " + other + " " + data.lp[1] + ", difference " +
      (mine - theirs >= 0 ? "+" : "") + (mine - theirs).toFixed(3) + " nats"));
    const both = make("div", undefined, "both");
    if (data.best.policy) both.append(table("Most likely under the policy, in nats", data.best.policy, data.text, other));
    if (data.best.other) both.append(table("Most likely under " + other + ", in nats", data.best.other, data.text, other));
    target.replaceChildren(line, both);
  };

  const reach = (token) => {
    token.closest(".heat").querySelectorAll(".token").forEach((one) => { one.tabIndex = one === token ? 0 : -1; });
    token.focus();
  };

  document.addEventListener("click", (event) => {
    const token = event.target.closest?.(".token[data-token]");
    if (token) { reach(token); show(token); }
  });
  document.addEventListener("focusin", (event) => { if (event.target.matches?.(".token[data-token]")) show(event.target); });
  document.addEventListener("keydown", (event) => {
    const token = event.target.closest?.(".token[data-token]");
    if (token) {
      const all = [...token.closest(".heat").querySelectorAll(".token")], at = all.indexOf(token);
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
      if (to === undefined || !all[to]) return;
      event.preventDefault();
      reach(all[to]);
      return;
    }
    const form = event.target.closest?.(".outputs-form");
    if (form && event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); form.requestSubmit(); }
  });
})();
