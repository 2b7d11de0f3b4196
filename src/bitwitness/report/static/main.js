/* Draws what there is; a part that cannot be drawn says so in its place, and the others are drawn. */
bw.redraw = []; /* when the colours change */
bw.resize = {}; /* when the window does, by part */

(async () => {
  const parts = { timeline: bw.timeline, heat: () => bw.switched("heat", bw.heatmap), tree: () => bw.switched("tree", bw.tree), graph: bw.graph, table: bw.table };
  for (const [name, draw] of Object.entries(parts)) {
    if (!bw.data[name]) continue;
    try {
      await draw();
    } catch (error) {
      bw.at(name).textContent = `This part could not be drawn here: ${error}`;
      console.error(error);
    }
  }
  document.documentElement.dataset.drawn = "yes";
})();

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => bw.redraw.forEach((draw) => draw()));
let waiting = 0;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => Object.values(bw.resize).forEach((draw) => draw()), 120);
});
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
