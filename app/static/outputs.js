/* The page Outputs: tokens of a text are chosen by a click or with the arrow keys; the one of the URL's query is pressed. */
nnx.tokens = (element, name, trigger, watch) => {
  const tokens = () => [...element.querySelectorAll("[data-token]")];
  const mark = () => {
    const chosen = new URLSearchParams(location.search).get(name), all = tokens();
    const first = all.find((one) => one.dataset.token === chosen) ?? all[0];
    for (const one of all) {
      one.tabIndex = one === first ? 0 : -1;
      one.setAttribute("aria-pressed", one.dataset.token === chosen);
    }
  };
  const choose = (one) => { one.focus(); nnx.chosen = one.dataset.token; trigger("select", {}); setTimeout(mark, 50); };
  element.addEventListener("click", (event) => {
    const one = event.target.closest("[data-token]");
    if (one) choose(one);
  });
  element.addEventListener("keydown", (event) => {
    const all = tokens(), at = all.indexOf(event.target), last = all.length - 1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last, Enter: at, " ": at }[event.key];
    if (at < 0 || !all[to]) return;
    event.preventDefault();
    choose(all[to]);
  });
  watch("value", mark);
  mark();
};
/* Votes on answers: the buttons that the page draws below them. */
nnx.votes = (element, trigger) => element.addEventListener("click", (event) => {
  const vote = event.target.closest("[data-vote]")?.dataset.vote;
  if (vote) trigger("select", { index: 0, value: vote });
});
