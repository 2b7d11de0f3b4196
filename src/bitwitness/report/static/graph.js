/* The graph around the first wrong operator, laid out by dagre. */
bw.graph = () => {
  const { nodes, edges, states } = bw.data.graph;
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 34, marginx: 12, marginy: 12 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const node of nodes) node.module = node.module === "." ? "the model itself" : node.module;
  for (const node of nodes) graph.setNode(String(node.id), { width: 190, height: 54 });
  for (const [from, to] of edges) graph.setEdge(String(from), String(to));
  dagre.layout(graph);
  const { width, height } = graph.graph();
  const image = bw.svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  const tip = bw.svg("marker", { id: "tip", viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 8, markerHeight: 8, orient: "auto" });
  tip.append(bw.svg("path", { class: "arrow", d: "M0 0 L8 4 L0 8 z" }));
  image.append(tip);
  for (const edge of graph.edges()) {
    const points = graph.edge(edge).points.map((one) => `${one.x.toFixed(1)} ${one.y.toFixed(1)}`);
    image.append(bw.svg("path", { class: "edge", d: `M${points.join(" L")}`, "marker-end": "url(#tip)" }));
  }
  let centre = null;
  for (const node of nodes) {
    const { x, y } = graph.node(String(node.id));
    const words = `${node.module}, ${node.op}, ${node.phase}: ${node.said}`;
    const group = bw.svg("g", { class: `node focusable ${node.state}`, tabindex: 0, role: "img", "aria-label": words, transform: `translate(${x - 95} ${y - 27})` });
    group.append(
      bw.svg("title", {}, words), bw.svg("rect", { width: 190, height: 54, rx: 6 }),
      bw.svg("text", { x: 8, y: 16, "font-weight": 600 }, bw.cut(node.op, 24)),
      bw.svg("text", { x: 8, y: 31, class: "small" }, bw.cut(`${node.module} (${node.phase})`, 30)),
      bw.svg("text", { x: 8, y: 46, class: "small" }, (node.state === "first" ? "✖ " : node.state === "differs" ? "▲ " : "") + bw.cut(states[node.state], 26)),
    );
    const tell = () => { bw.at("graph-said").textContent = words; };
    group.addEventListener("focus", tell);
    group.addEventListener("pointerenter", tell);
    image.append(group);
    if (node.state === "first") centre = { x, y };
  }
  const place = bw.at("graph");
  place.append(image);
  if (centre) place.scrollTo(centre.x - place.clientWidth / 2, centre.y - place.clientHeight / 2);
};
