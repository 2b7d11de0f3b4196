// The page around the graph, the tree and what is live.
import { Tree, chip, element } from "./tree.js";
import { look } from "./live.js";

const $ = (id) => document.getElementById(id);
const shared = { open: new Set(), more: new Set(), chosen: null, redraw: () => trees.forEach((tree) => tree.draw()) };
let scene = null;
let place = null;
let trees = [];
let suspects = { list: [], at: -1 };
let asked = 0;
let places = "";

async function ask(path) {
  const answer = await fetch(path);
  const told = await answer.json().catch(() => ({ error: `the server answers ${answer.status}` }));
  if (!answer.ok) throw new Error(told.error);
  return told;
}

function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function show(view) {
  for (const button of document.querySelectorAll("nav button")) button.setAttribute("aria-pressed", String(button.dataset.view === view));
  for (const name of ["graph", "tree", "live"]) $(name).hidden = name !== view;
  $("details").hidden = view !== "tree" || !$("told").childElementCount;
  if (view === "graph" && $("explorer").dataset.wanted) {
    // Not before it is seen: it measures its window at the start.
    $("explorer").src = $("explorer").dataset.wanted;
    delete $("explorer").dataset.wanted;
  }
  if (view === "tree") scroll();
}

// On a phone the panes lie below each other: there the first that has the node is shown.
function scroll() {
  const narrow = matchMedia("(max-width: 700px)").matches;
  for (const tree of trees) if (tree.scroll(narrow ? "start" : "center") && narrow) return;
}

const viewed = () => document.querySelector("nav button[aria-pressed=true]")?.dataset.view;

function fill(select, values, chosen) {
  select.replaceChildren(...values.map((value) => element("option", { value }, String(value))));
  if (values.includes(chosen)) select.value = chosen;
  select.disabled = values.length < 2;
}

function controls(at) {
  const { rank, step } = scene.places[at];
  fill($("step"), [...new Set(scene.places.map((one) => one.step))].sort((a, b) => a - b), step);
  fill($("rank"), [...new Set(scene.places.map((one) => one.rank))].sort((a, b) => a - b), rank);
}

function moved(event) {
  const [step, rank] = [Number($("step").value), Number($("rank").value)];
  const at = (test) => scene.places.findIndex(test);
  let number = at((one) => one.step === step && one.rank === rank);
  // This rank may not have that step: what was just chosen counts.
  if (number < 0) number = at((one) => (event.target.id === "rank" ? one.rank === rank : one.step === step));
  open(number);
}

async function open(number, keep = true) {
  const mine = ++asked;
  try {
    const found = await ask(`data/place?place=${number}`);
    if (mine !== asked) return;
    place = number;
    controls(number);
    trees = found.sides.map((side) => new Tree(side, scene.looks, shared, choose));
    $("panes").replaceChildren(...trees.map((tree) => tree.element));
    suspects = { list: found.suspects, at: -1 };
    $("explorer").dataset.wanted = found.explorer ?? "";
    document.querySelector("nav [data-view=graph]").hidden = !found.explorer;
    hint(found);
    const stays = keep && trees.some((tree) => tree.places.has(shared.chosen)) && viewed() !== "graph";
    if (stays) choose(shared.chosen);
    else if (suspects.list.length) next(1);
    else { $("told").replaceChildren(); shared.chosen = null; told(); }
    problem("");
    if (!keep || viewed() !== "live") show(found.explorer && found.at_once && viewed() !== "tree" ? "graph" : "tree");
  } catch (error) { problem(error.message); }
}

function hint(found) {
  const text = $("hint");
  text.replaceChildren();
  if (scene.explorer.off) text.append("Shown as a tree, as --no-explorer asks; without it Model Explorer, where it is installed, shows the graph.");
  else if (!scene.explorer.installed) text.append("Shown as a tree. For the graph: ", element("code", {}, scene.explorer.install));
  else if (!found.explorer) text.append(`${found.nodes} nodes: too many for Model Explorer (${found.most}); shown as a tree. --step and --rank show less.`);
  text.hidden = !text.childNodes.length;
}

function told() {
  const count = suspects.list.length;
  $("which").textContent = count ? `suspect ${suspects.at + 1} of ${count}` : "no suspects";
  $("next").disabled = $("previous").disabled = !count;
}

function next(by) {
  const count = suspects.list.length;
  if (!count) return;
  suspects.at = suspects.at < 0 ? 0 : (suspects.at + by + count) % count;
  told();
  choose(suspects.list[suspects.at].id);
  // Both panes open at it: the pairs have one name.
  $("explorer").contentWindow?.postMessage({ cmd: "model-explorer-select-node-by-node-id", nodeId: shared.chosen }, location.origin);
}

async function choose(id) {
  shared.chosen = id;
  trees.forEach((tree) => tree.reveal(id));
  shared.redraw();
  scroll();
  try {
    const found = await ask(`data/node?place=${place}&id=${encodeURIComponent(id)}`);
    if (shared.chosen !== id) return;
    $("told").replaceChildren(...found.map(node));
    $("details").hidden = viewed() !== "tree";
  } catch (error) { problem(error.message); }
}

function node(one) {
  const pairs = (list) => element("dl", {}, ...list.flatMap(([key, value]) => [element("dt", {}, key), element("dd", {}, value)]));
  const outputs = one.outputs.map((output) => element("div", {}, element("h3", {}, "output"), pairs(output)));
  return element("div", {}, element("h3", {}, one.graph), pairs(one.attributes), ...outputs);
}

let found = { text: "", at: 0 };
function search(event) {
  event.preventDefault();
  const text = $("search").value.trim().toLowerCase();
  if (!text) return;
  const hits = [...new Set(trees.flatMap((tree) => tree.side.nodes.filter((one) => one[0].toLowerCase().includes(text)).map((one) => one[0])))];
  found = { text, at: found.text === text ? (found.at + 1) % Math.max(1, hits.length) : 0 };
  if (!hits.length) return problem(`nothing here is called ${text}`);
  problem("");
  choose(hits[found.at]);
  $("explorer").contentWindow?.postMessage({ cmd: "model-explorer-select-node-by-node-id", nodeId: shared.chosen }, location.origin);
}

async function grow() {
  try {
    await look(ask);
    const told = await ask("data/scene");
    if (JSON.stringify(told.places) !== places) begin(told);
  } catch (error) { problem(`${error.message}; is bitwitness view still running?`); }
  setTimeout(grow, 2000);
}

function begin(told) {
  const before = scene;
  scene = told;
  places = JSON.stringify(told.places);
  const names = told.runs.length ? told.runs : told.live;
  $("runs").textContent = names.join(told.runs.length > 1 ? " ⇔ " : ", ");
  $("conclusion").textContent = told.conclusion;
  $("legend").replaceChildren(...Object.keys(told.looks).map((state) => chip(state, told.looks, true)));
  const some = told.places.length > 0;
  for (const id of ["controls", "legend"]) $(id).hidden = !some;
  document.querySelector("nav [data-view=tree]").hidden = !some;
  if (!some) return show("live");
  if (before?.places.length && place !== null && place < told.places.length) controls(place);
  else open(told.first, Boolean(before));
}

for (const button of document.querySelectorAll("nav button")) button.addEventListener("click", () => show(button.dataset.view));
for (const id of ["step", "rank"]) $(id).addEventListener("change", moved);
$("controls").addEventListener("submit", search);
$("previous").addEventListener("click", () => next(-1));
$("next").addEventListener("click", () => next(1));
$("close").addEventListener("click", () => { $("told").replaceChildren(); $("details").hidden = true; });
ask("data/scene").then(begin).catch((error) => problem(error.message)).finally(grow);
