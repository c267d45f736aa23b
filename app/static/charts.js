/* Shows the values of a chart under the pointer. */
(() => {
  const figure = (value) => (Math.abs(value) >= 1e4 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : Number(value.toPrecision(4)).toString());
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };
  const placed = (x, name) => (name === "step" || name === "tokens" ? name + " " + Math.round(x).toLocaleString() : Number(x.toPrecision(3)) + " " + name);
  const parsed = new WeakMap();
  const figures = (plot) => { if (!parsed.has(plot)) parsed.set(plot, JSON.parse(plot.dataset.chart)); return parsed.get(plot); };

  document.addEventListener("pointermove", (event) => {
    const plot = event.target.closest?.("[data-chart]");
    document.querySelectorAll(".chart.pointed").forEach((one) => { if (!plot || !one.contains(plot)) { one.classList.remove("pointed"); one.querySelector(".reading").textContent = ""; } });
    if (!plot) return;
    const data = figures(plot), box = plot.getBoundingClientRect();
    const [left, right, width] = data.plot;
    const at = Math.min(right, Math.max(left, ((event.clientX - box.left) / box.width) * width));
    const x = data.x[0] + ((at - left) / (right - left)) * (data.x[1] - data.x[0]);
    const said = data.series.map((one) => { const n = nearest(one.x, x); return [one.x[n], one.name + " " + figure(one.y[n])]; });
    const section = plot.closest(".chart");
    section.classList.add("pointed");
    section.querySelector(".reading").textContent = placed(said[0][0], data.xName) + ": " + said.map((one) => one[1]).join(", ");
    const line = plot.querySelector(".pointer");
    line.setAttribute("x1", at); line.setAttribute("x2", at);
  });
})();
