/* The search over the table of cases, and all that is folded opened for print. Without it the page shows all of it. */
(() => {
  const rows = [...document.querySelectorAll("#table tbody tr")];
  const search = document.getElementById("search");
  const said = document.getElementById("table-said");
  if (search) {
    const texts = rows.map((row) => row.textContent.toLowerCase());
    search.addEventListener("input", () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      let kept = 0;
      rows.forEach((row, i) => {
        row.hidden = !words.every((word) => texts[i].includes(word));
        kept += !row.hidden;
      });
      said.textContent = `${kept} of ${rows.length} rows match.`;
    });
    document.getElementById("table-controls").hidden = false;
  }
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((one) => { one.open = true; });
  });
  addEventListener("afterprint", () => opened.forEach((one) => { one.open = false; }));
})();
