/* Line charts over the steps of a run. */
const SVG = "http://www.w3.org/2000/svg";
function s(tag, props, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(props)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
const WIDTH = 330, HEIGHT = 150, LEFT = 66, BOTTOM = 132, TOP = 8;
/* As many digits as tell values apart that differ by `range`. */
function figure(value, range = Infinity) {
  const digits = Math.min(9, Math.max(3, Math.ceil(Math.log10(Math.abs(value) / range)) + 2)) || 3;
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e5) && size > range / 1e4 ? value.toExponential(1) : String(+value.toPrecision(digits));
}
const finite = (value) => (typeof value === "number" ? value : NaN);
/* The lower and the upper end of the band around the first series, where the panel has one. */
function limits(panel, row) {
  if (!panel.band) return [NaN, NaN];
  if (Array.isArray(panel.band)) return panel.band.map((name) => finite(row[name]));
  return [-1, 1].map((sign) => finite(row[panel.series[0]]) + sign * finite(row[panel.band]));
}

/* Round numbers around the values: 1, 2 or 5 times a power of ten apart, three to five of them. */
function ticksAround(low, high) {
  const rough = (high - low) / 3, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((n) => n * power >= rough) ?? 10);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}

/* One chart, or null where no row has a number of its series. */
function chart(panel, history) {
  const unit = panel.axis ?? "step";
  const positive = panel.series.flatMap((name) => history.map((row) => finite(row[name]))).filter((v) => v > 0);
  const isLog = panel.log && positive.reduce((a, b) => Math.max(a, b), 0) > 10 * positive.reduce((a, b) => Math.min(a, b), Infinity);
  const scale = isLog ? (v) => (v > 0 ? Math.log10(v) : NaN) : (v) => v;
  const points = panel.series.map((name) => history.map((row) => [row.step, scale(finite(row[name]))]).filter(([, value]) => Number.isFinite(value)));
  const all = points.flat();
  if (!all.length) return null;
  const extent = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
  const band = history.map((row) => [row.step, ...limits(panel, row)]).filter(([, low, high]) => Number.isFinite(low) && Number.isFinite(high));
  let [low, high] = extent([...all.map((p) => p[1]), ...(isLog ? [] : band.flatMap((p) => p.slice(1)))]);
  const [first, last] = extent(all.map((p) => p[0]));
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const ticks = isLog || !(high - low > Math.abs(high) * 1e-12) ? [low, (low + high) / 2, high] : ticksAround(low, high);
  [low, high] = [ticks[0], ticks.at(-1)];
  const x = (step) => LEFT + ((step - first) / (last - first || 1)) * (WIDTH - LEFT - 6);
  const y = (value) => BOTTOM - ((Math.min(high, Math.max(low, value)) - low) / (high - low)) * (BOTTOM - TOP);
  const at = ([step, v]) => `${x(step).toFixed(1)},${y(v).toFixed(1)}`;
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": panel.title });
  for (const value of ticks) {
    svg.append(s("line", { class: "axis", x1: LEFT, x2: WIDTH - 6, y1: y(value), y2: y(value) }),
      s("text", { x: LEFT - 5, y: y(value) + 3, "text-anchor": "end" }, figure(isLog ? 10 ** value : value, isLog ? Infinity : high - low)));
  }
  const place = (step) => (Number.isInteger(step) ? String(step) : figure(step, last - first));
  svg.append(s("text", { x: LEFT, y: HEIGHT - 4 }, first === last ? `${unit} ${place(first)}` : place(first)));
  if (first !== last) svg.append(s("text", { x: WIDTH - 6, y: HEIGHT - 4, "text-anchor": "end" }, `${unit} ${place(last)}`));
  if (band.length > 1) {
    const outline = [...band.map((p) => at([p[0], p[2]])), ...band.reverse().map((p) => at([p[0], p[1]]))];
    svg.append(s("polygon", { class: "band s0", points: outline.join(" ") }));
  }
  points.forEach((series, i) => {
    svg.append(s("polyline", { class: `s${i % 8}`, points: series.map(at).join(" ") }));
    if (series.length < 40) for (const [step, v] of series) svg.append(s("circle", { class: `s${i % 8}`, cx: x(step), cy: y(v), r: 1.8 }));
  });
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const step = first + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - 6) * (last - first || 1);
    const known = history.filter((row) => panel.series.some((name) => typeof row[name] === "number"));
    const row = known.reduce((best, each) => (Math.abs(each.step - step) < Math.abs(best.step - step) ? each : best));
    const [from, to] = limits(panel, row);
    tip(event, [`${unit} ${place(row.step)}`, ...panel.series.map((name) => `${name}  ${typeof row[name] === "number" ? figure(row[name]) : row[name] ?? "–"}`),
      ...(Number.isFinite(from) ? [`from ${figure(from)} to ${figure(to)}`] : [])]);
  });
  svg.addEventListener("mouseleave", () => { $("hint").style.visibility = "hidden"; });
  const latest = (name) => [...history].reverse().find((row) => typeof row[name] === "number")?.[name];
  const key = (name, i) => h("span", { class: `key s${i % 8}`, "data-series": name }, `${name} `, h("b", {}, latest(name) === undefined ? "–" : figure(latest(name))));
  return h("article", { class: "chart" }, h("h2", {}, panel.title, panel.unit && h("span", { class: "soft" }, ` (${panel.unit})`)), svg,
    h("div", { class: "legend" }, panel.series.map(key)));
}
function tip(event, lines) {
  const box = $("hint");
  box.textContent = lines.join("\n");
  box.style.left = `${Math.min(event.clientX + 12, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${Math.min(event.clientY + 12, innerHeight - box.offsetHeight - 8)}px`;
  box.style.visibility = "visible";
}
