// The modules of a step as a tree: rows are made when their group is opened, so that 30,000 nodes cost nothing closed.
// All text goes in as text: names in a recording may hold markup.
const SHOWN = 400;

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else if (value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function chip(state, looks, words = false) {
  const look = looks[state];
  return element("span", { class: `state ${state}`, title: look.words }, words ? `${look.symbol} ${look.words}` : look.symbol);
}

export class Tree {
  // `shared`: which groups are open and which node is chosen, the same in all panes.
  constructor(side, looks, shared, choose) {
    Object.assign(this, { side, looks, shared, choose });
    this.root = { path: "", name: side.name, groups: new Map(), nodes: [], state: "seen", size: 0 };
    this.places = new Map();
    for (const node of side.nodes) this.add(node);
    this.list = element("ul", { class: "tree", role: "tree" });
    this.element = element("div", { class: "pane" }, element("h3", {}, side.name), this.list);
    this.draw();
  }

  add(node) {
    const [id, , number, state] = node;
    let group = this.root;
    const rank = this.looks[state].rank;
    const parents = [];
    let path = "";
    for (const part of this.side.groups[number]) {
      path += `/${part}`;
      if (!group.groups.has(part)) group.groups.set(part, { path, name: part, groups: new Map(), nodes: [], state: "seen", size: 0 });
      group = group.groups.get(part);
      group.size += 1;
      if (rank > this.looks[group.state].rank) group.state = state;
      parents.push(path);
    }
    group.nodes.push(node);
    this.places.set(id, parents);
  }

  reveal(id) {
    for (const path of this.places.get(id) ?? []) this.shared.open.add(path);
  }

  draw() {
    this.list.replaceChildren(...this.children(this.root));
  }

  scroll(block) {
    const row = this.list.querySelector("[aria-current=true]");
    row?.scrollIntoView({ block });
    return row !== null;
  }

  children(group) {
    const rows = [...group.groups.values()].map((child) => this.group(child));
    const limit = this.shared.more.has(group.path) ? Infinity : SHOWN;
    const chosen = group.nodes.findIndex((node) => node[0] === this.shared.chosen);
    const nodes = group.nodes.filter((_, number) => number < limit || number === chosen);
    rows.push(...nodes.map((node) => this.node(node)));
    if (nodes.length < group.nodes.length) {
      const more = element("button", { type: "button", class: "row more" }, `… ${group.nodes.length - nodes.length} more`);
      more.addEventListener("click", () => { this.shared.more.add(group.path); this.shared.redraw(); });
      rows.push(element("li", {}, more));
    }
    return rows;
  }

  group(group) {
    const open = this.shared.open.has(group.path);
    const row = element("button", { type: "button", class: "row group", "aria-expanded": String(open), "data-path": group.path },
      element("span", { class: "twist" }, open ? "▾" : "▸"), chip(group.state, this.looks),
      element("span", { class: "name" }, group.name), element("span", { class: "count" }, String(group.size)));
    row.addEventListener("click", () => {
      if (!this.shared.open.delete(group.path)) this.shared.open.add(group.path);
      this.shared.redraw();
    });
    const item = element("li", { role: "treeitem" }, row);
    if (open) item.append(element("ul", { role: "group" }, ...this.children(group)));
    return item;
  }

  node([id, label, , state, change]) {
    const row = element("button", { type: "button", class: "row node", "data-id": id, "aria-current": String(id === this.shared.chosen) },
      element("span", { class: "twist" }), chip(state, this.looks), element("span", { class: "name" }, label));
    if (change) row.append(element("span", { class: "change", title: "relative change" }, change.toPrecision(2)));
    row.addEventListener("click", () => this.choose(id));
    return element("li", { role: "treeitem" }, row);
  }
}
