/* The icicle: modules from left to right, what is in a module to its right; darker is worse, and a sign says so, too. */
bw.tree = ({ root, levels }) => {
  const signs = ["", "·", "▲", "▲▲", "✖"];
  const place = bw.at("tree");
  let top = root, focused = null;
  prepare(root, null);

  function prepare(node, parent) {
    node.parent = parent;
    node.inside.forEach((one) => prepare(one, node));
    node.leaves = node.inside.reduce((sum, one) => sum + one.leaves, 0) || 1;
    node.depth = node.inside.reduce((most, one) => Math.max(most, one.depth + 1), 0);
  }

  const words = (node) => `${node.path}: worst inside: ${levels[node.worst] || "nothing recorded"}${node.said ? `; itself: ${node.said}` : ""}`;

  function draw() {
    const width = place.clientWidth || 600;
    const shown = Math.max(1, Math.min(top.depth + 1, Math.floor(width / 105), 8));
    const height = Math.min(width < 500 ? 480 : 760, Math.max(60, top.leaves * 20));
    const image = bw.svg("svg", { width, height, role: "tree", "aria-label": "Modules by how bad they are" });
    const column = width / shown;
    add(top, 0, 0, height);
    place.replaceChildren(image);

    function add(node, depth, y, tall) {
      const group = bw.svg("g", { class: "focusable", role: "treeitem", tabindex: node === (focused || top) ? 0 : -1, "aria-label": words(node), "aria-level": depth + 1 });
      group.append(bw.svg("title", {}, words(node)), bw.svg("rect", { class: `cell level${node.worst}${tall < 4 ? " thin" : ""}`, x: depth * column, y, width: column, height: tall }));
      if (tall >= 13) group.append(bw.svg("text", { class: `on${node.worst}`, x: depth * column + 5, y: y + Math.min(tall / 2, 60) + 4 }, bw.cut(`${signs[node.worst] || ""} ${node.name}`.trim(), Math.floor(column / 7.2))));
      group.addEventListener("click", () => go(node === top && node.parent ? node.parent : node));
      group.addEventListener("focus", () => { focused = node; bw.at("tree-said").textContent = words(node); });
      group.addEventListener("pointerenter", () => { bw.at("tree-said").textContent = words(node); });
      group.addEventListener("keydown", (event) => key(event, node));
      node.element = group;
      image.append(group);
      if (depth + 1 >= shown) return;
      let from = y;
      for (const one of node.inside) {
        const part = (tall * one.leaves) / node.leaves;
        if (part >= 1) add(one, depth + 1, from, part);
        from += part;
      }
    }
  }

  function go(node) {
    top = node.inside.length ? node : node.parent || node;
    focused = top;
    draw();
    top.element.focus();
  }

  function key(event, node) {
    const beside = node.parent && node !== top ? node.parent.inside : [node];
    const at = beside.indexOf(node);
    const next = { ArrowRight: node.inside[0], ArrowLeft: node === top ? null : node.parent, ArrowDown: beside[at + 1], ArrowUp: beside[at - 1] }[event.key];
    if (event.key === "Enter" || event.key === " ") go(node);
    else if (event.key === "Escape" && top.parent) go(top.parent);
    else if (next && next.element && next.element.isConnected) next.element.focus();
    else return;
    event.preventDefault();
  }

  bw.at("tree-legend").replaceChildren(...levels.map((said, level) => {
    const swatch = bw.svg("svg", { class: "swatch", viewBox: "0 0 10 10" });
    swatch.append(bw.svg("rect", { class: `level${level}`, width: 10, height: 10 }));
    return bw.make("span", { className: "key" }, swatch, `${signs[level]} ${said}`);
  }));
  bw.at("tree-controls").append(bw.button("whole model", "show the whole model", () => go(root)), bw.make("span", { textContent: "Press a module to see what is in it; arrow keys move, Enter opens, Escape goes back." }));
  draw();
  bw.resize.tree = draw;
};
