"use strict";
{
  // Charts. Vega's interpreter evaluates expressions, so that the page needs no "unsafe-eval".
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const options = { actions: false, ast: true, renderer: "svg" };
  const draw = async (spec, number) => {
    const place = document.getElementById(`chart${number}`);
    let chart, waiting, width;
    const show = async () => {
      try {
        chart?.finalize();
        width = place.clientWidth;
        chart = await window.vegaEmbed(place, spec, options);
      } catch (error) {
        console.error(error);
        place.textContent = `This chart cannot be drawn: ${error.message}`;
      }
    };
    await show();
    // Draws the chart anew when its width changes; Vega's own adjustment leaves some charts as wide as they were.
    new ResizeObserver(() => {
      clearTimeout(waiting);
      if (place.clientWidth && place.clientWidth !== width) waiting = setTimeout(show, 100);
    }).observe(place);
  };
  const drawn = specs.map(draw);
  Promise.all(drawn).then(() => document.documentElement.setAttribute("data-drawn", ""));

  // Tables: a click on a column's name sorts by it, a second click in the opposite order.
  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const table = head.closest("table");
      const column = head.cellIndex;
      const isNumber = head.classList.contains("number");
      const before = head.getAttribute("aria-sort");
      const descending = before ? before === "ascending" : isNumber;
      for (const each of table.querySelectorAll("th")) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const key = (row) => {
        const cell = row.cells[column];
        if (!isNumber) return cell.dataset.key ?? cell.textContent;
        return cell.dataset.key === undefined ? null : Number(cell.dataset.key);
      };
      const compare = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === null || y === null) return (x === null) - (y === null); // unknown values are last
        const order = isNumber ? x - y : x.localeCompare(y, undefined, { numeric: true });
        return descending ? -order : order;
      };
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort(compare));
    });
  }

  // Paper has no folds.
  addEventListener("beforeprint", () => {
    for (const each of document.querySelectorAll("details")) each.open = true;
  });
}
