/* The timeline: one chart above the other for each number, with a common zoom; verdicts and findings as vertical lines. */
bw.timeline = () => {
  const { lines, marks } = bw.data.timeline;
  if (!lines.length) return bw.strip(marks);
  for (const line of lines) {
    line.x = new Int32Array(bw.bytes(line.steps).buffer);
    line.y = new Float64Array(bw.bytes(line.values).buffer);
  }
  const named = (line) => `${line.run ? line.run + ", " : ""}rank ${line.rank}`;
  const names = [...new Set(lines.map(named))];
  const metrics = [...new Set(lines.map((line) => line.metric))];
  const shown = new Set(metrics.slice(0, 2));
  const log = new Set(metrics.filter((one) => wide(lines.filter((line) => line.metric === one))));
  const place = bw.at("timeline");
  const chart = echarts.init(place, null, { renderer: "canvas" });
  const zoom = { start: 0, end: 100 };

  function draw() {
    const chosen = metrics.filter((one) => shown.has(one));
    const height = 190;
    place.style.height = `${chosen.length * height + 64}px`;
    chart.resize();
    chart.setOption(option(chosen, height), true);
  }

  function option(chosen, height) {
    const ink = bw.colour("--ink"), soft = bw.colour("--soft"), rule = bw.colour("--line");
    const axis = { axisLabel: { color: soft }, axisLine: { lineStyle: { color: soft } }, splitLine: { lineStyle: { color: rule } } };
    const steps = lines.flatMap((line) => (line.x.length ? [line.x[0], line.x[line.x.length - 1]] : []));
    const range = { min: Math.min(...steps, ...marks.map((one) => one.step)), max: Math.max(...steps, ...marks.map((one) => one.step)) };
    const series = lines.filter((line) => shown.has(line.metric)).map((line) => oneLine(line, chosen.indexOf(line.metric), log.has(line.metric)));
    chosen.forEach((metric, index) => series.push(events(index)));
    return {
      animation: false,
      textStyle: { color: ink },
      aria: { enabled: true, label: { description: `Timeline of ${chosen.join(", ")} over the steps, with ${marks.length} events` } },
      grid: chosen.map((_, index) => ({ left: 70, right: 24, top: 34 + index * height, height: height - 62 })),
      title: chosen.map((metric, index) => ({ text: metric + (log.has(metric) ? " (log)" : ""), left: 8, top: 6 + index * height, textStyle: { color: ink, fontSize: 13 } })),
      xAxis: chosen.map((_, index) => ({ ...axis, ...range, type: "value", gridIndex: index, minInterval: 1, name: index === chosen.length - 1 ? "step" : "", nameLocation: "middle", nameGap: 24, nameTextStyle: { color: soft } })),
      yAxis: chosen.map((metric, index) => ({ ...axis, type: log.has(metric) ? "log" : "value", gridIndex: index, scale: true, axisLabel: { color: soft, formatter: bw.figure } })),
      legend: { show: names.length > 1, type: "scroll", right: 8, top: 2, width: "60%", data: names, textStyle: { color: ink }, pageTextStyle: { color: ink } },
      dataZoom: [
        { type: "inside", xAxisIndex: chosen.map((_, i) => i), ...zoom, filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true },
        { type: "slider", xAxisIndex: chosen.map((_, i) => i), ...zoom, filterMode: "none", bottom: 6, height: 24, textStyle: { color: soft } },
      ],
      /* rich text is drawn on the canvas: no element is made of a run's names */
      tooltip: { trigger: "axis", renderMode: "richText", confine: true, backgroundColor: bw.colour("--raised"), textStyle: { color: ink }, formatter: said },
      series,
    };
  }

  function oneLine(line, index, logarithmic) {
    const data = [];
    line.x.forEach((step, i) => { if (!logarithmic || line.y[i] > 0) data.push([step, line.y[i]]); });
    const which = names.indexOf(named(line)), colour = bw.colour(`--c${which % 8}`);
    const bad = line.bad.map((step) => ({ xAxis: step, label: { formatter: "NaN/Inf", color: bw.colour("--bad") }, lineStyle: { color: bw.colour("--bad"), type: "dotted" } }));
    return {
      type: "line", name: named(line), xAxisIndex: index, yAxisIndex: index, data,
      showSymbol: data.length < 40, symbolSize: 4, lineStyle: { width: 1.3, color: colour, type: which % 16 > 7 ? "dashed" : "solid" }, itemStyle: { color: colour },
      markLine: bad.length ? { symbol: "none", silent: true, data: bad.slice(0, 50) } : undefined,
    };
  }

  function events(index) {
    const data = marks.map((one) => ({
      xAxis: one.step, name: one.said,
      label: { show: index === 0, formatter: one.verdict ? "✘" : "?", color: bw.colour(one.verdict ? "--bad" : "--unsure"), fontSize: one.verdict ? 16 : 11 },
      lineStyle: { color: bw.colour(one.verdict ? "--bad" : "--unsure"), type: one.verdict ? "solid" : "dashed", width: one.verdict ? 2 : 1 },
    }));
    return { type: "line", name: "", data: [], xAxisIndex: index, yAxisIndex: index, markLine: { symbol: "none", silent: true, data } };
  }

  function said(points) {
    const rows = points.filter((one) => one.seriesName).map((one) => `${one.seriesName}: ${bw.figure(one.data[1])}`);
    const step = points.length ? points[0].axisValue : 0;
    const near = marks.filter((one) => one.step === step).map((one) => one.said);
    return [`step ${step}`, ...rows.slice(0, 12), ...near].join("\n");
  }

  function wide(some) {
    const values = some.flatMap((line) => Array.from(line.y));
    const least = values.reduce((a, b) => Math.min(a, b), Infinity), largest = values.reduce((a, b) => Math.max(a, b), -Infinity);
    return least > 0 && largest / least > 100;
  }

  function move(start, end) {
    const width = Math.min(Math.max(end - start, 0.5), 100);
    zoom.start = Math.min(Math.max(start, 0), 100 - width);
    zoom.end = zoom.start + width;
    chart.dispatchAction({ type: "dataZoom", start: zoom.start, end: zoom.end });
  }

  chart.on("datazoom", () => { const now = chart.getOption().dataZoom[0]; zoom.start = now.start; zoom.end = now.end; });
  const quarter = () => (zoom.end - zoom.start) / 4;
  const controls = bw.at("timeline-controls");
  controls.append(
    bw.button("+", "zoom in", () => move(zoom.start + quarter(), zoom.end - quarter())),
    bw.button("−", "zoom out", () => move(zoom.start - 2 * quarter(), zoom.end + 2 * quarter())),
    bw.button("◀", "earlier steps", () => move(zoom.start - quarter(), zoom.end - quarter())),
    bw.button("▶", "later steps", () => move(zoom.start + quarter(), zoom.end + quarter())),
    bw.button("all", "all steps", () => move(0, 100)),
  );
  for (const metric of metrics.slice(0, 24)) {
    controls.append(bw.tick(metric, shown.has(metric), (on) => { on ? shown.add(metric) : shown.delete(metric); if (shown.size) draw(); }));
    controls.append(bw.tick("log", log.has(metric), (on) => { on ? log.add(metric) : log.delete(metric); draw(); }));
  }
  const thinned = lines.some((line) => line.x.length < line.points - line.bad.length);
  bw.at("timeline-said").textContent = "✘ a verdict, ? a suspicion. Ctrl and the wheel, or the buttons, zoom." + (thinned ? " Thinned: the least and the largest of each span of steps are kept, so that no spike is lost." : "");
  draw();
  bw.redraw.push(draw);
  bw.resize.timeline = () => chart.resize();
};

/* Where no numbers were kept: events alone, on a line. */
bw.strip = (marks) => {
  const place = bw.at("timeline");
  const last = Math.max(1, ...marks.map((one) => one.step));
  function draw() {
    const width = place.clientWidth || 600;
    const image = bw.svg("svg", { width, height: 70, role: "img", "aria-label": `${marks.length} events between step 0 and step ${last}` });
    const x = (step) => 20 + ((width - 40) * step) / last;
    image.append(bw.svg("line", { x1: 20, x2: width - 20, y1: 45, y2: 45, stroke: bw.colour("--soft") }));
    for (const one of marks) {
      const colour = bw.colour(one.verdict ? "--bad" : "--unsure");
      const mark = bw.svg("g");
      mark.append(bw.svg("title", {}, one.said), bw.svg("line", { x1: x(one.step), x2: x(one.step), y1: one.verdict ? 22 : 35, y2: 55, stroke: colour, "stroke-width": one.verdict ? 3 : 1 }));
      if (one.verdict) mark.append(bw.svg("text", { x: x(one.step), y: 16, "text-anchor": x(one.step) > width - 60 ? "end" : "middle", fill: colour }, `✘ step ${one.step}`));
      image.append(mark);
    }
    image.append(bw.svg("text", { x: 20, y: 66, fill: bw.colour("--soft") }, "step 0"), bw.svg("text", { x: width - 20, y: 66, "text-anchor": "end", fill: bw.colour("--soft") }, `step ${last}`));
    place.replaceChildren(image);
  }
  bw.at("timeline-said").textContent = "✘ a verdict; a short line is a suspicion. No loss or gradient norms were kept of this run: bitwitness monitor keeps them.";
  draw();
  bw.redraw.push(draw);
  bw.resize.timeline = draw;
};
