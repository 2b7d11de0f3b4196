// What grows: events and two lines of each run, asked for again and again.
import { element } from "./tree.js";

const MOST = 2000;
const SVG = "http://www.w3.org/2000/svg";
let next = 0;

export async function look(ask) {
  const news = await ask(`data/live?after=${next}`);
  if (news.next < next) document.getElementById("events").replaceChildren();
  next = news.next;
  document.getElementById("jobs").replaceChildren(...news.runs.map(job));
  const list = document.getElementById("events");
  for (const event of news.events) list.prepend(row(event, news.runs));
  while (list.childElementCount > MOST) list.lastElementChild.remove();
  document.getElementById("none").hidden = list.childElementCount > 0;
  document.getElementById("alive").textContent = news.runs.some((run) => run.state === "running") ? "●" : "";
  return news;
}

function row(event, runs) {
  const where = [runs.length > 1 ? runs[event.run].name : "", `step ${event.step ?? "?"}`, `rank ${event.rank}`].filter(Boolean).join(", ");
  const loud = event.severity === "error" || event.type === "verdict" ? "made" : event.severity === "warning" ? "passed" : "seen";
  const what = [event.type, event.cause, event.action, event.sensor].filter(Boolean).join(" · ");
  return element("li", {}, element("span", { class: `state ${loud}` }, loud === "made" ? "✗" : loud === "passed" ? "!" : "·"), " ",
    element("span", { class: "dim" }, where), element("span", { class: "dim" }, what), `${event.site ? `${event.site}: ` : ""}${event.message ?? ""}`);
}

function job(run) {
  // Nothing wrong in its numbers is no all-clear for a run that did not come to its end.
  const short = run.status === "fine" && ["failed", "interrupted", "terminated"].includes(run.state);
  const mark = short ? "passed" : { fine: "equal", findings: "made", unread: "passed" }[run.status] ?? "seen";
  const sign = short ? "!" : { fine: "✓", findings: "✗", unread: "?" }[run.status] ?? "·";
  const box = element("div", { class: "job" },
    element("h3", {}, element("span", { class: `state ${mark}` }, sign), ` ${run.name} (${run.state})`), element("p", {}, run.sentence));
  if (run.to_do) box.append(element("p", {}, `to do: ${run.to_do}`));
  const names = { loss: "loss", grad_norm: "total gradient norm" };
  const lines = Object.entries(run.series).map(([metric, points]) => line(names[metric] ?? metric, points));
  box.append(element("div", { class: "lines" }, ...lines));
  return box;
}

function line(name, points) {
  const known = points.filter(([, value]) => value !== null);
  const steps = points.map(([step]) => step);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const values = known.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (step) => 4 + (332 * (step - first)) / Math.max(1, last - first);
  const y = (value) => 84 - (78 * (value - low)) / (high - low || 1);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "line");
  svg.setAttribute("viewBox", "0 0 340 90");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${name}, steps ${first} to ${last}`);
  let drawing = "";
  let pen = "M";
  for (const [step, value] of points) {
    if (value === null) { pen = "M"; svg.append(dot(x(step))); continue; }
    drawing += `${pen}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  }
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", drawing);
  svg.append(path);
  const now = known.length ? known[known.length - 1][1].toPrecision(4) : "not finite";
  const gaps = points.length - known.length;
  return element("figure", {}, svg, element("figcaption", {},
    `${name}: ${now} at step ${last}` + (known.length ? `, ${low.toPrecision(3)} to ${high.toPrecision(3)}` : "") + (gaps ? `; ${gaps} not finite (●)` : "")));
}

function dot(x) {
  const made = document.createElementNS(SVG, "circle");
  made.setAttribute("cx", x.toFixed(1));
  made.setAttribute("cy", "6");
  made.setAttribute("r", "3");
  return made;
}
