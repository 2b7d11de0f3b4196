"use strict";
/* What all parts of the page use. Text from a run is only ever set by textContent: nothing in it can become an element. */
const bw = {};

bw.data = JSON.parse(document.getElementById("data").textContent);
bw.at = (id) => document.getElementById(id);

/** Return a new HTML element with properties, and what is in it. */
bw.make = (tag, properties = {}, ...inside) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...inside);
  return made;
};

/** Return a new SVG element with attributes; `words` becomes its text. */
bw.svg = (tag, attributes = {}, words = "") => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (words) made.textContent = words;
  return made;
};

bw.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
bw.cut = (text, most) => (text.length > most ? text.slice(0, Math.max(most - 1, 1)) + "…" : text);
bw.figure = (value) => (value === 0 ? "0" : Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(3) : String(+value.toPrecision(5)));

/** Return a text without its beginning where it is too long: the end of a module's path tells it from its neighbours. */
bw.end = (text, most) => (text.length > most ? "…" + text.slice(text.length - Math.max(most - 1, 1)) : text);

/** Draw one part, of the run that is chosen where there are several; `draw` is given its data. */
bw.switched = (name, draw) => {
  const all = [bw.data[name], ...(bw.data[`more_${name}`] || [])];
  const show = (number) => {
    bw.at(name).replaceChildren();
    const controls = bw.at(`${name}-controls`);
    controls.replaceChildren();
    if (all.length > 1) {
      const list = bw.choice("run", all.map((one, i) => [i, one.run]), (value) => { show(Number(value)); bw.at(`${name}-controls`).querySelector("select").focus(); }, number);
      controls.append(list);
    }
    return draw(all[number]);
  };
  return show(0);
};

/** Return a labelled list to choose from; `choices`: [value, words]; `chosen` is told of the value. */
bw.choice = (label, choices, chosen, now = choices[0][0]) => {
  const list = bw.make("select");
  for (const [value, words] of choices) list.append(bw.make("option", { value, textContent: words, selected: value === now }));
  list.addEventListener("change", () => chosen(list.value));
  return bw.make("label", {}, label, list);
};

/** Return a labelled tick. */
bw.tick = (label, on, changed) => {
  const box = bw.make("input", { type: "checkbox", checked: on });
  box.addEventListener("change", () => changed(box.checked));
  return bw.make("label", {}, box, label);
};

bw.button = (label, words, pressed) => {
  const made = bw.make("button", { type: "button", textContent: label, title: words });
  made.setAttribute("aria-label", words);
  made.addEventListener("click", pressed);
  return made;
};

/** Return the bytes of a base64 text. */
bw.bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

/** Return the bytes that zlib packed. */
bw.unpacked = async (text) => {
  const stream = new Blob([bw.bytes(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
};
