/* A device of a mesh that is pointed at or focused tells its block and marks its replicas; arrow keys move the focus. */
for (const kind of ["pointerover", "focusin"]) addEventListener(kind, ({ target }) => {
  const cell = target.closest?.("button.device"), devices = cell?.closest(".devices");
  for (const one of devices?.querySelectorAll(".device") ?? []) one.classList.toggle("same", one.dataset.block === cell.dataset.block);
  if (cell) devices.parentElement.querySelector(".reading-cell").textContent = cell.ariaLabel;
});
addEventListener("keydown", (event) => {
  const cell = event.target.closest?.("button.device"), columns = Number(cell?.parentElement.dataset.columns);
  const all = [...(cell?.closest(".devices").querySelectorAll(".device") ?? [])], at = all.indexOf(cell), end = all.length - 1;
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + columns, ArrowUp: at - columns, Home: 0, End: end }[event.key];
  if (!all[to]) return;
  event.preventDefault();
  [cell.tabIndex, all[to].tabIndex] = [-1, 0];
  all[to].focus();
});
