/* The table: a search over all cells, a sort by any column, and no more rows on the page than somebody reads. */
bw.table = () => {
  const { said, columns, rows } = bw.data.table;
  const place = bw.at("table");
  const body = bw.make("tbody");
  let most = 50, words = [], sorted = null;
  const texts = rows.map((row) => row.join("\u0000").toLowerCase());

  function found() {
    const kept = rows.filter((_, i) => words.every((word) => texts[i].includes(word)));
    if (!sorted) return kept;
    const { column, up } = sorted;
    const order = (a, b) => {
      const [x, y] = [Number(a[column]), Number(b[column])];
      return a[column] === "" ? 1 : b[column] === "" ? -1 : (Number.isNaN(x) || Number.isNaN(y) ? (a[column] < b[column] ? -1 : a[column] > b[column] ? 1 : 0) : x - y) * (up ? 1 : -1);
    };
    return [...kept].sort(order);
  }

  function draw() {
    const kept = found();
    body.replaceChildren(...kept.slice(0, most).map((row) => bw.make("tr", {}, ...row.map((cell, column) => {
      const made = bw.make("td", { textContent: cell, className: columns[column] === "message" ? "message" : columns[column] === "site" ? "where" : cell.length > 50 ? "long" : "" });
      made.dataset.column = columns[column]; /* on a phone a row is a block, and each cell says what it is */
      return made;
    }))));
    bw.at("table-said").textContent = `${said}. ${kept.length} match; ${Math.min(most, kept.length)} on the page.`;
    more.hidden = kept.length <= most;
  }

  const heads = columns.map((title, column) => {
    const head = bw.make("th", { scope: "col" });
    head.append(bw.button(title, `sort by ${title}`, () => {
      sorted = { column, up: !(sorted && sorted.column === column && sorted.up) };
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sorted.up ? "ascending" : "descending");
      draw();
    }));
    return head;
  });
  place.append(bw.make("table", {}, bw.make("thead", {}, bw.make("tr", {}, ...heads)), body));
  const search = bw.make("input", { type: "search", placeholder: "words, all of which must be there" });
  search.addEventListener("input", () => { words = search.value.toLowerCase().split(/\s+/).filter(Boolean); most = 50; draw(); });
  const more = bw.button("more rows", "show more rows", () => { most += 200; draw(); });
  bw.at("table-controls").append(bw.make("label", {}, "search", search), more);
  draw();
};
