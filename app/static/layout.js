/* Pointing at a device of a mesh, or focusing it, tells its block and marks its replicas; arrow keys move the focus. */
for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, ({ target }) => {
  const cell = target.closest?.("button.device") ?? document.activeElement?.closest("button.device");
  for (const devices of document.querySelectorAll(".devices")) {
    const block = devices.contains(cell) ? cell.dataset.block : null;
    devices.classList.toggle("pointed", block !== null);
    for (const one of devices.querySelectorAll("button.device")) one.classList.toggle("same", one.dataset.block === block);
    if (block !== null) devices.parentElement.querySelector(".reading-cell").textContent = cell.ariaLabel;
  }
});
document.addEventListener("keydown", (event) => {
  const cell = event.target.closest?.("button.device");
  if (!cell) return;
  const all = [...cell.closest(".devices").querySelectorAll("button.device")], at = all.indexOf(cell);
  const columns = Number(cell.parentElement.dataset.columns), end = all.length - 1 - at;
  const next = all[at + { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -at, End: end }[event.key]];
  if (!next) return;
  event.preventDefault();
  [cell.tabIndex, next.tabIndex] = [-1, 0];
  next.focus();
});
