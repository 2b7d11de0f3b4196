/* The heat map: a byte is a pixel. 0: nothing; 255: NaN or Inf; 1 to 254: between the least and the largest of the layer. */
bw.heatmap = (heat) => {
  const canvas = bw.make("canvas", { tabIndex: 0 });
  const cursor = bw.make("div", { className: "cursor", hidden: true });
  const labels = bw.make("div", { className: "labels" });
  const steps = bw.make("div", { className: "steps" });
  const field = bw.make("div", { className: "field" }, canvas, cursor);
  bw.at("heat").append(bw.make("div", { className: "heat" }, labels, bw.make("div", {}, field, steps)));
  const columns = heat.spans.length;
  /* rank -1: of all ranks the worst at each place */
  let kind = Object.keys(heat.kinds)[0], measure = Object.keys(heat.measures)[0], rank = heat.ranks.length > 1 ? -1 : 0;
  let layer, bytes = new Uint8Array(0), row = 0, column = 0, cellHeight = 4;

  /* darker is more; of z, red is above usual and blue below; NaN and Inf are magenta, which is neither */
  function colour(byte) {
    if (byte === 0) return [255, 255, 255];
    if (byte === 255) return [209, 0, 209];
    if (measure !== "z") { const t = (byte - 1) / 253; return [247 - 239 * t, 251 - 203 * t, 255 - 148 * t]; }
    const z = (layer.largest * (byte - 127.5)) / 126.5, size = Math.abs(z);
    /* what is within two deviations is nearly white; beyond that a step of colour is a factor, and only 30 and more are dark */
    const t = size < 2 ? 0.06 * size : 0.12 + (0.88 * Math.log(size / 2)) / Math.log(Math.max(layer.largest, 30) / 2);
    return z > 0 ? [255 - 130 * t * t, 255 - 255 * t, 255 - 255 * t] : [255 - 255 * t, 255 - 200 * t, 255 - 110 * t * t];
  }

  /* a pixel as one number, as little-endian machines (all that have browsers) lay it out */
  const packed = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;

  function number(byte) {
    if (byte === 0) return "nothing recorded";
    if (byte === 255) return "NaN or Inf";
    const value = layer.least + ((byte - 1) / 253) * (layer.largest - layer.least);
    return measure === "z" ? `${bw.figure(+value.toPrecision(3))} deviations from its usual` : measure === "change" ? `differs by ${bw.figure(+Math.exp(value).toPrecision(3))} of its size` : `about ${bw.figure(+Math.exp(value).toPrecision(3))}`;
  }

  async function load() {
    layer = heat.layers.find((one) => one.kind === kind && one.measure === measure) || heat.layers.find((one) => one.kind === kind);
    measure = layer.measure;
    const all = await Promise.all((rank < 0 ? layer.ranks : [layer.ranks[rank]]).map(bw.unpacked));
    bytes = all[0];
    const bad = Float32Array.from({ length: 256 }, (_, byte) => badness(byte));
    for (const other of all.slice(1)) for (let i = 0; i < bytes.length; i++) if (bad[other[i]] > bad[bytes[i]]) bytes[i] = other[i];
    draw();
    if (cursor.hidden) toWorst();
  }

  function badness(byte) {
    if (byte === 0) return -1;
    return byte === 255 ? 256 : measure === "z" ? Math.abs(byte - 127.5) : byte;
  }

  function toWorst() {
    let worst = 0;
    bytes.forEach((byte, i) => { if (badness(byte) > badness(bytes[worst])) worst = i; });
    to(Math.floor(worst / columns), worst % columns);
  }

  const whose = () => (rank < 0 ? "the worst of all ranks" : `rank ${heat.ranks[rank]}`);

  function draw() {
    const rows = layer.rows.length;
    cellHeight = Math.min(18, Math.max(2, 560 / rows));
    canvas.width = columns;
    canvas.height = rows;
    canvas.style.height = `${rows * cellHeight}px`;
    labels.style.height = canvas.style.height;
    const image = new ImageData(columns, rows);
    const palette = Uint32Array.from({ length: 256 }, (_, byte) => packed(colour(byte)));
    const pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < pixels.length; i++) pixels[i] = palette[bytes[i]];
    canvas.getContext("2d").putImageData(image, 0, 0);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${heat.kinds[kind]}, ${heat.measures[measure]}, ${whose()}: ${rows} rows, steps ${heat.spans[0][0]} to ${heat.spans[columns - 1][1]}. Arrow keys move.`);
    steps.replaceChildren(bw.make("span", { textContent: `step ${heat.spans[0][0]}` }), bw.make("span", { textContent: `step ${heat.spans[columns - 1][1]}` }));
    legend();
    if (cursor.hidden) names();
    else point();
  }

  /* names of as many rows as there is room for, and of the chosen one, which takes its neighbours' room */
  function names() {
    const every = Math.max(1, Math.ceil(14 / cellHeight)), chosen = cursor.hidden ? -every : row;
    const letters = Math.max(8, Math.floor(labels.clientWidth / 6));
    labels.replaceChildren(...layer.rows.flatMap((name, i) => {
      if (i !== chosen && (i % every || Math.abs(i - chosen) < every)) return [];
      const label = bw.make("span", { textContent: bw.end(name, letters), title: name, className: i === chosen ? "chosen" : "" });
      label.style.top = `${(i + 0.5) * cellHeight}px`;
      return [label];
    }));
  }

  function legend() {
    const strip = bw.make("canvas", { className: "scale", width: 254, height: 1 });
    const image = new ImageData(254, 1);
    for (let byte = 1; byte < 255; byte++) image.data.set([...colour(byte), 255], 4 * (byte - 1));
    strip.getContext("2d").putImageData(image, 0, 0);
    const nan = bw.svg("svg", { class: "swatch", viewBox: "0 0 10 10" });
    nan.append(bw.svg("rect", { width: 10, height: 10, fill: "#d100d1" }));
    const out = heat.left_out ? ` ${heat.left_out} quieter rows are left out.` : "";
    bw.at("heat-legend").replaceChildren(number(1) + " ", strip, " " + number(254) + "   ", nan, `NaN or Inf.${out}`);
  }

  function point() {
    const box = canvas.getBoundingClientRect(), wide = box.width / columns;
    cursor.hidden = false;
    names();
    cursor.style.left = `${column * wide}px`;
    cursor.style.top = `${row * cellHeight}px`;
    cursor.style.width = `${wide}px`;
    cursor.style.height = `${cellHeight}px`;
    const [first, last] = heat.spans[column];
    const when = first === last ? `step ${first}` : `steps ${first} to ${last}`;
    bw.at("heat-said").textContent = `${layer.rows[row]}, ${when}, ${whose()}: ${number(bytes[row * columns + column])}`;
  }

  function to(newRow, newColumn) {
    row = Math.min(Math.max(newRow, 0), layer.rows.length - 1);
    column = Math.min(Math.max(newColumn, 0), columns - 1);
    point();
  }

  function under(event) {
    const box = canvas.getBoundingClientRect();
    to(Math.floor((event.clientY - box.top) / cellHeight), Math.floor(((event.clientX - box.left) / box.width) * columns));
  }

  canvas.addEventListener("pointermove", under);
  canvas.addEventListener("pointerdown", under);
  canvas.addEventListener("keydown", (event) => {
    const far = event.shiftKey ? 10 : 1;
    const moves = { ArrowUp: [-far, 0], ArrowDown: [far, 0], ArrowLeft: [0, -far], ArrowRight: [0, far] };
    if (event.key in moves) { to(row + moves[event.key][0], column + moves[event.key][1]); event.preventDefault(); }
  });
  const controls = bw.at("heat-controls");
  controls.append(
    bw.choice("of", Object.entries(heat.kinds), (value) => { kind = value; load(); }),
    bw.choice("as", Object.entries(heat.measures), (value) => { measure = value; load(); }),
    bw.choice("rank", [...(rank < 0 ? [[-1, "all: the worst"]] : []), ...heat.ranks.map((one, i) => [i, String(one)])], (value) => { rank = Number(value); load(); }),
    bw.button("the worst", "go to the worst place", toWorst),
  );
  bw.resize.heat = () => { draw(); };
  return load();
};
