"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

/* Every text reaches the page as a text node; nothing of `data` is ever parsed as markup. */
function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") element.className = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const number = (value, digits = 3) =>
  value === null || value === undefined ? "–" : String(+value.toFixed(digits)).replace("-", "−");
const plural = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const mean = (values) => (values.length ? sum(values) / values.length : NaN);

/* ---- what is known of each trajectory before anything is drawn ---- */

function parse(messages) {
  try {
    const value = JSON.parse(messages);
    return Array.isArray(value) ? value : [value];
  } catch {
    return [{ role: "prompt", content: messages }];
  }
}
const isImage = (part) => part && typeof part === "object" && String(part.type || "").includes("image");
const textOf = (content) =>
  typeof content === "string" ? content
    : Array.isArray(content) ? content.map((part) => (typeof part === "string" ? part : isImage(part) ? "" : part.text ?? "")).join("")
    : JSON.stringify(content ?? "");

data.trajectories.forEach((t, order) => {
  t.order = order;
  for (const turn of t.turns) turn.parsed = parse(turn.messages);
  t.length = sum(t.turns.map((turn) => turn.ids.length));
  t.surprise = mean(t.turns.flatMap((turn) => turn.logprobs.filter((p) => p !== null)));
  t.ratio = Math.max(0, ...t.turns.flatMap((turn) => (turn.ratios || []).map((r) => (r ? Math.max(r, 1 / r) : 0))));
  const texts = t.turns.flatMap((turn) => [...turn.parsed.map((m) => textOf(m.content)), turn.completion]);
  t.search = [t.id, t.task, t.group, ...texts].join("\n").toLowerCase();
});
const rewards = data.trajectories.map((t) => t.reward).filter((r) => r !== null);
const lowest = Math.min(0, ...rewards), highest = Math.max(1, ...rewards);
const shade = (reward) =>
  reward === null ? "" : ` r${Math.min(4, Math.floor(((reward - lowest) / (highest - lowest || 1)) * 5))}`;
const pill = (reward) => h("span", { class: "pill" + shade(reward) }, number(reward));

/* ---- filters ---- */

const FAILURES = "failures";
let shown = [], current = null, coloring = data.trajectories.some((t) => t.ratio > 0) ? "ratio" : "logprob";

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

/* ---- one trajectory ---- */

const bins = { logprob: [-0.1, -0.7, -1.6, -2.7, -4], ratio: [1.02, 1.1, 1.35, 2] };
function shadeToken(turn, i) {
  if (coloring === "none") return "";
  if (coloring === "logprob") {
    const value = turn.logprobs[i];
    return value === null ? "none" : `p${bins.logprob.filter((edge) => value < edge).length}`;
  }
  const value = turn.ratios ? turn.ratios[i] : null;
  if (value === null) return "none";
  const size = bins.ratio.filter((edge) => Math.max(value, 1 / value) > edge).length;
  return `d${value < 1 && size ? -size : size}`;
}
const visible = (text) => (text === "" ? "∅" : text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t"));

function tokens(turn) {
  return h("div", { class: "tokens" }, turn.ids.map((id, i) => {
    const text = data.tokens[id];
    const span = h("span", { class: shadeToken(turn, i) + (text === "" ? " blank" : "") }, visible(text));
    span.addEventListener("mouseenter", (event) => hint(event, turn, i));
    span.addEventListener("mouseleave", () => { $("hint").style.visibility = "hidden"; });
    return span;
  }));
}
const advantage = (turn, i) => (Array.isArray(turn.advantages) ? turn.advantages[i] : turn.advantages);
function hint(event, turn, i) {
  const lp = turn.logprobs[i];
  const lines = [`token ${i}   id ${turn.ids[i]}   ${JSON.stringify(data.tokens[turn.ids[i]])}`,
    `log-prob   ${number(lp, 4)}   p ${lp === null ? "–" : Math.exp(lp).toPrecision(3)}`];
  if (turn.ratios) lines.push(`ratio      ${number(turn.ratios[i], 4)}   trainer over sampler`);
  if (turn.advantages !== null) lines.push(`advantage  ${number(advantage(turn, i), 4)}`);
  const box = $("hint"), at = event.target.getBoundingClientRect();
  box.textContent = lines.join("\n");
  box.style.left = `${Math.min(at.left, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${at.bottom + box.offsetHeight + 8 > innerHeight ? at.top - box.offsetHeight - 4 : at.bottom + 4}px`;
  box.style.visibility = "visible";
}

function imageGrid(keys) {
  if (!keys.length) return null;
  return h("div", { class: "images" }, keys.map((key) => {
    const image = data.images[key];
    if (!image) return h("div", { class: "absent" }, `image ${key.slice(0, 8)} is not embedded in this page`);
    return h("img", { src: image.uri, class: image.width < 112 ? "tiny" : null,
      alt: `image ${key.slice(0, 8)}, ${image.width} × ${image.height} pixels`, title: `${key.slice(0, 12)} · ${image.width} × ${image.height}` });
  }));
}
/* The images of a message are the newest of the turn's: those before were shown in earlier turns. */
function message(m, keys) {
  const parts = typeof m.content === "string" || !Array.isArray(m.content) ? [textOf(m.content)] : m.content;
  const body = parts.map((part) => isImage(part) ? imageGrid([keys.shift()].filter(Boolean))
    : h("div", { class: "text" }, typeof part === "string" ? part : part.text ?? JSON.stringify(part)));
  return h("div", { class: "message" }, h("div", { class: "role" }, m.role || "prompt"), h("div", {}, body));
}
const fact = (name, value) => h("span", {}, `${name} `, h("b", {}, value));
const partsOf = (parts) => Object.entries(parts).map(([name, value]) => fact(name, number(value)));

function turnCard(turn, index, t) {
  const count = sum(turn.parsed.map((m) => (Array.isArray(m.content) ? m.content.filter(isImage).length : 0)));
  const fresh = count ? turn.images.slice(-count) : index === 0 ? turn.images.slice() : [];
  const loose = count ? [] : fresh;
  const many = t.turns.length > 1;
  return h("article", { class: "turn" },
    h("div", { class: "bar" },
      many && fact("turn", String(index + 1)), fact("policy version", String(turn.version)),
      fact("prompt", plural(turn.prompt_tokens, "token")), fact("completion", plural(turn.ids.length, "token")),
      fact("finish", turn.finish), fact("generated in", `${number(turn.seconds[0], 2)} s`),
      typeof turn.advantages === "number" && fact("advantage", number(turn.advantages)),
      many && fact("reward", number(turn.reward)), many && partsOf(turn.parts),
      turn.defect && h("span", { class: "failed" }, `no action: ${turn.defect}`)),
    loose.length ? h("div", { class: "message" }, h("div", { class: "role" }, "images"), imageGrid(loose)) : null,
    turn.parsed.map((m) => message(m, fresh)),
    h("div", { class: "message" }, h("div", { class: "role" }, "completion"),
      turn.ids.length ? tokens(turn) : h("div", { class: "text" }, turn.completion)));
}

/* A long episode at a glance: what each turn was shown, said and earned. The first was shown the goal. */
const ends = (text, most) => (text.length > most ? `… ${text.slice(-most)}` : text);
const begins = (text, most) => (text.length > most ? `${text.slice(0, most)} …` : text);
function outline(t) {
  if (t.turns.length < 4) return null;
  const line = (turn, i) => {
    const image = data.images[turn.images[turn.images.length - 1]];
    const state = turn.state ?? turn.parsed.map((m) => textOf(m.content)).join("\n");
    const jump = () => $("detail").querySelectorAll(".turn")[i].scrollIntoView();
    return h("tr", {}, h("td", {}, h("button", { class: "button", type: "button", onclick: jump }, String(i + 1))),
      h("td", {}, image && h("img", { class: "thumb", src: image.uri, alt: "" })),
      h("td", { class: "text" }, begins(state.trim(), i ? 300 : 2000)),
      h("td", { class: "text mono" }, ends(turn.completion.trim(), 160)),
      h("td", {}, turn.defect && h("span", { class: "failed" }, turn.defect)), h("td", {}, pill(turn.reward)));
  };
  const names = ["turn", "", "shown", "said", "", "reward"];
  return h("table", { class: "plain outline" }, h("thead", {}, h("tr", {}, names.map((name) => h("th", {}, name)))),
    h("tbody", {}, t.turns.map(line)));
}

const scales = {
  logprob: () => ["certain", ["p0", "p1", "p2", "p3", "p4", "p5"], "unlikely"],
  ratio: () => ["ratio ½", ["d-4", "d-3", "d-2", "d-1", "d0", "d1", "d2", "d3", "d4"], "2"],
};
function legend(hasRatios) {
  const choice = h("select", { id: "coloring", onchange: (e) => { coloring = e.target.value; draw(); } },
    [["logprob", "log-prob when sampled"], hasRatios && ["ratio", "ratio, trainer over sampler"], ["none", "nothing"]]
      .filter(Boolean).map(([value, text]) => h("option", { value, selected: value === coloring }, text)));
  const scale = scales[coloring]?.();
  return h("div", { class: "legend" }, h("label", {}, "Color tokens by ", choice),
    scale && h("span", {}, scale[0] + " "), scale && h("span", { class: "scale" }, scale[1].map((c) => h("span", { class: c }))),
    scale && h("span", {}, " " + scale[2]),
    h("span", {}, h("kbd", {}, "←"), " ", h("kbd", {}, "→"), " previous, next"));
}

function draw() {
  for (const [t, element] of rows) element.setAttribute("aria-current", String(t === current));
  $("hint").style.visibility = "hidden";
  if (!current) return $("detail").replaceChildren(h("p", { class: "empty" }, "No trajectory to show."));
  const t = current;
  const group = data.trajectories.filter((other) => other.group === t.group);
  const parts = [
    h("div", { class: "heading" }, h("span", { class: "id" }, t.task), pill(t.reward),
      t.truncated && h("span", { class: "failed" }, "out of turns or of context")),
    h("dl", { class: "figures" }, ...Object.entries({ trajectory: t.id, group: t.group, environment: t.environment, split: t.split,
      ...(t.step === null ? {} : { step: t.step }), ...Object.fromEntries(Object.entries(t.parts).map(([k, v]) => [`reward: ${k}`, number(v)])) })
      .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value))))),
    group.length > 1 ? h("div", { class: "siblings" }, h("span", { class: "soft" }, "Its group: "),
      group.map((other) => h("button", { type: "button", class: "pill" + shade(other.reward), title: other.id,
        "aria-current": String(other === t), onclick: () => select(other) }, number(other.reward)))) : null,
    outline(t),
    legend(t.turns.some((turn) => turn.ratios)),
    ...t.turns.map((turn, i) => turnCard(turn, i, t)),
    data.omitted.images ? h("p", { class: "soft" }, `${plural(data.omitted.images, "more image")} of this run did not fit into the page.`) : null,
  ];
  $("detail").replaceChildren(...parts.filter(Boolean));
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
