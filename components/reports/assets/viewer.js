data = JSON.parse($("data").textContent);
data.trajectories.forEach((t, order) => {
  digest(t).order = order;
  const texts = t.turns.flatMap((turn) => [...turn.parsed.map((m) => textOf(m.content)), turn.completion]);
  t.search = [t.id, t.task, t.group, ...texts].join("\n").toLowerCase();
});
rewardRange(data.trajectories.map((t) => t.reward));

/* ---- filters ---- */

const FAILURES = "failures";
let shown = [], current = null;
if (data.trajectories.some((t) => t.ratio > 0)) coloring = "ratio";

function options(select, values, all, label = String) {
  select.append(h("option", { value: "" }, all));
  for (const value of [...new Set(values)].filter((v) => v !== null)) {
    select.append(h("option", { value: String(value) }, label(value)));
  }
  select.closest("label").hidden = select.options.length < 3 && select.id !== "task";
}
options($("task"), data.trajectories.map((t) => t.task), "all");
options($("step"), data.trajectories.map((t) => t.step).filter((s) => s !== null).sort((a, b) => a - b), "all");
options($("group"), data.trajectories.map((t) => t.group), "all");
if (data.failures.length) $("task").append(h("option", { value: FAILURES }, `failures (${data.failures.length})`));

const orders = {
  "order": (a, b) => a.order - b.order,
  "reward-": (a, b) => b.reward - a.reward,
  "reward+": (a, b) => a.reward - b.reward,
  "length-": (a, b) => b.length - a.length,
  "surprise+": (a, b) => a.surprise - b.surprise,
  "ratio-": (a, b) => b.ratio - a.ratio,
};

function apply() {
  const find = $("find").value.trim().toLowerCase();
  const low = $("low").value === "" ? -Infinity : +$("low").value;
  const high = $("high").value === "" ? Infinity : +$("high").value;
  const failures = $("task").selectedOptions[0]?.value === FAILURES && $("task").selectedIndex === $("task").options.length - 1;
  shown = failures ? [] : data.trajectories.filter((t) =>
    (!find || t.search.includes(find)) &&
    (!$("task").value || t.task === $("task").value) &&
    (!$("step").value || String(t.step) === $("step").value) &&
    (!$("group").value || t.group === $("group").value) &&
    (t.reward === null || (t.reward >= low && t.reward <= high)));
  shown.sort(orders[$("sort").value]);
  $("count").textContent = failures ? plural(data.failures.length, "failure")
    : `${shown.length.toLocaleString("en")} of ${data.trajectories.length.toLocaleString("en")}`;
  list(failures);
  if (failures) return drawFailures();
  if (!shown.includes(current)) current = shown[0] || null;
  draw();
}

/* ---- the list ---- */

const rows = new Map();
function row(t) {
  if (!rows.has(t)) {
    const first = t.turns.flatMap((turn) => turn.images)[0];
    const image = data.images[first];
    const said = t.turns.map((turn) => turn.completion.trim()).join(" › ").slice(0, 120);
    rows.set(t, h("button", { class: "row", type: "button", "data-trajectory": t.id, onclick: () => select(t) },
      image ? h("img", { class: "thumb", src: image.uri, alt: "" }) : h("span", { class: "thumb" }),
      h("span", { class: "name-box" }, h("div", { class: "name" }, (t.step === null ? "" : `step ${t.step} · `) + t.task),
        h("div", { class: "said" }, said || "(empty)")),
      pill(t.reward)));
    rows.get(t).children[1].style.minWidth = "0";
  }
  return rows.get(t);
}
function list(failures) {
  const left = data.omitted.trajectories;
  $("list").replaceChildren(...shown.map(row),
    ...(shown.length || failures ? [] : [h("p", { class: "empty" }, "Nothing fits these filters.")]),
    ...(left ? [h("p", { class: "empty" }, `${plural(left, "more trajectory").replace("trajectorys", "trajectories")} in the rollout tables.`)] : []));
}
function select(t) {
  current = t;
  draw();
}

function draw() {
  for (const [t, element] of rows) element.setAttribute("aria-current", String(t === current));
  $("hint").style.visibility = "hidden";
  if (!current) return $("detail").replaceChildren(h("p", { class: "empty" }, "No trajectory to show."));
  const t = current;
  const group = data.trajectories.filter((other) => other.group === t.group);
  const left = data.omitted.images;
  const parts = trajectoryParts(t, group, select, draw);
  if (left) parts.push(h("p", { class: "soft" }, `${plural(left, "more image")} of this run did not fit into the page.`));
  $("detail").replaceChildren(...parts);
  $("detail").scrollTop = 0;
  rows.get(t)?.scrollIntoView({ block: "nearest" });
}

function drawFailures() {
  current = null;
  $("detail").replaceChildren(h("h2", {}, "Trajectories that could not be finished"),
    h("table", { class: "plain" }, h("thead", {}, h("tr", {}, ["reason", "task", "trajectory", "detail"].map((n) => h("th", {}, n)))),
      h("tbody", {}, data.failures.map((f) => h("tr", {}, h("td", { class: "failed" }, f.reason), h("td", {}, f.task),
        h("td", { class: "mono" }, f.id), h("td", { class: "text mono" }, f.detail))))));
}

/* ---- keys ---- */

function move(by) {
  const at = shown.indexOf(current), next = shown[Math.max(0, Math.min(shown.length - 1, at + by))];
  if (next) select(next);
}
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const by = { ArrowRight: 1, ArrowDown: 1, j: 1, ArrowLeft: -1, ArrowUp: -1, k: -1 }[event.key];
  if (by) { event.preventDefault(); move(by); }
  if (event.key === "/") { event.preventDefault(); $("find").focus(); }
});
$("sort").addEventListener("change", () => { current = null; });
$("filters").addEventListener("change", (event) => { if (event.target === $("sort")) apply(); });
$("filters").addEventListener("input", (event) => { if (event.target !== $("sort")) apply(); });
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("filters").addEventListener("reset", () => setTimeout(apply));
apply();
