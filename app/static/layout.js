/* The grid of devices: hovering one shows its block and marks its replicas; arrow keys move the focus. */
(() => {
  const tell = (cell) => {
    const whole = cell?.closest(".devices");
    document.querySelectorAll(".devices.pointed").forEach((one) => {
      if (one === whole) return;
      one.classList.remove("pointed");
      one.querySelectorAll(".same").forEach((other) => other.classList.remove("same"));
    });
    if (!whole) return;
    whole.classList.add("pointed");
    whole.querySelectorAll("button.device").forEach((one) => one.classList.toggle("same", one.dataset.block === cell.dataset.block));
    const line = whole.parentElement.querySelector(".reading-cell");
    if (line) line.textContent = cell.getAttribute("aria-label");
  };
  document.addEventListener("pointerover", (event) => { if (event.target.closest?.("#page-layout")) tell(event.target.closest("button.device") || document.activeElement.closest?.("button.device")); });
  document.addEventListener("focusin", (event) => tell(event.target.closest?.("button.device")));
  document.addEventListener("keydown", (event) => {
    const cell = event.target.closest?.("button.device");
    if (!cell) return;
    const all = [...cell.closest(".devices").querySelectorAll("button.device")], at = all.indexOf(cell);
    const columns = parseInt(cell.parentElement.dataset.columns);
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -at, End: all.length - 1 - at }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = all[at + step];
    if (!next) return;
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });

  /* A response replaces the fields of these pages: keep the focus. */
  let held = null;
  document.addEventListener("focusin", (event) => { held = event.target.id && event.target.closest?.("#page-layout, #page-compare") ? event.target.id : null; });
  const typed = {};
  document.addEventListener("input", (event) => { if (event.target.matches?.("#page-layout input[type=search]")) typed[event.target.id] = event.target.value; });
  document.addEventListener("nnx:settled", () => {
    if (!held || document.activeElement !== document.body) return;
    const one = document.getElementById(held);
    if (!one) return;
    if (typed[held] !== undefined) { one.value = typed[held]; }
    one.focus({ preventScroll: true });
    if (one.setSelectionRange && one.type === "search") one.setSelectionRange(one.value.length, one.value.length);
  });
})();
