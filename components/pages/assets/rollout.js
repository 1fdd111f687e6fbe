"use strict";
/* Draws one rollout; both pages use it. `data` has the text of tokens and the images by key. */
let data = { trajectories: [], tokens: {}, images: {}, omitted: {} };
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
const isImage = (part) => part && typeof part === "object" && /image|video/.test(part.type || "");
const textOf = (content) =>
  typeof content === "string" ? content
    : Array.isArray(content) ? content.map((part) => (typeof part === "string" ? part : isImage(part) ? "" : part.text ?? "")).join("")
    : JSON.stringify(content ?? "");


function digest(t) {
  for (const turn of t.turns) turn.parsed = parse(turn.messages);
  t.length = sum(t.turns.map((turn) => turn.ids.length));
  t.surprise = mean(t.turns.flatMap((turn) => turn.logprobs.filter((p) => p !== null)));
  t.ratio = Math.max(0, ...t.turns.flatMap((turn) => (turn.ratios || []).map((r) => (r ? Math.max(r, 1 / r) : 0))));
  return t;
}
let lowest = 0, highest = 1, coloring = "logprob";
function rewardRange(rewards) {
  lowest = Math.min(0, ...rewards.filter((r) => r !== null));
  highest = Math.max(1, ...rewards.filter((r) => r !== null));
}
const shade = (reward) =>
  reward === null ? "" : ` r${Math.min(4, Math.floor(((reward - lowest) / (highest - lowest || 1)) * 5))}`;
const pill = (reward) => h("span", { class: "pill" + shade(reward) }, number(reward));


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
    const shown = h("img", { src: image.uri, class: image.width < 112 ? "tiny" : null,
      alt: `image ${key.slice(0, 8)}, ${image.width} × ${image.height} pixels`, title: `${key.slice(0, 12)} · ${image.width} × ${image.height}` });
    return /^data:image\/apng|\.apng$/.test(image.uri) ? h("figure", { class: "clip" }, shown, frameStrip(image)) : shown;
  }));
}
/* A video plays as an image. This shows its frames side by side, in browsers that can decode them one by one. */
function frameStrip(image) {
  const strip = h("div", { class: "frames" });
  const fill = async () => {
    const data = image.uri.startsWith("data:") ? Uint8Array.from(atob(image.uri.split(",")[1]), (c) => c.charCodeAt(0))
      : await (await fetch(image.uri)).arrayBuffer();
    const decoder = new ImageDecoder({ data, type: "image/png" });
    await Promise.all([decoder.tracks.ready, decoder.completed]);
    for (let i = 0; i < decoder.tracks.selectedTrack.frameCount; i++) {
      const frame = (await decoder.decode({ frameIndex: i })).image;
      const canvas = h("canvas", { width: frame.displayWidth, height: frame.displayHeight, title: `frame ${i + 1}` });
      canvas.getContext("2d").drawImage(frame, 0, 0);
      frame.close();
      strip.append(canvas);
    }
  };
  if (typeof ImageDecoder === "function") fill().catch(() => strip.remove());
  return strip;
}
/* The images of a message are the newest of the turn's: those before were shown in earlier turns. */
function message(m, keys) {
  const parts = typeof m.content === "string" || !Array.isArray(m.content) ? [textOf(m.content)] : m.content;
  const body = parts.map((part) => isImage(part) ? imageGrid([keys.shift()].filter(Boolean))
    : h("div", { class: "text" }, typeof part === "string" ? part : part.text ?? JSON.stringify(part)));
  return h("div", { class: "message" }, h("div", { class: "role" }, m.role || "prompt"), h("div", {}, body));
}
const fact = (name, value) => h("span", {}, `${name} `, h("b", {}, value));
const called = ([name, status]) => h("span", { class: status === "ok" ? null : "failed" }, `called ${name || "a tool"}: ${status}`);
const partsOf = (parts) => Object.entries(parts).map(([name, value]) => fact(name, number(value)));

/* What a turn was shown. Images that no message has a place for come first, those of the first turn only. */
function shownMessages(turn, first) {
  const count = sum(turn.parsed.map((m) => (Array.isArray(m.content) ? m.content.filter(isImage).length : 0)));
  const fresh = count ? turn.images.slice(-count) : first ? turn.images.slice() : [];
  const loose = count || !fresh.length ? [] : [h("div", { class: "message" }, h("div", { class: "role" }, "images"), imageGrid(fresh))];
  return [...loose, ...turn.parsed.map((m) => message(m, fresh))];
}

function turnCard(turn, index, t) {
  const many = t.turns.length > 1;
  return h("article", { class: "turn" },
    h("div", { class: "bar" },
      many && fact("turn", String(index + 1)), fact("policy version", String(turn.version)),
      fact("prompt", plural(turn.prompt_tokens, "token")), fact("completion", plural(turn.ids.length, "token")),
      fact("finish", turn.finish), fact("generated in", `${number(turn.seconds[0], 2)} s`),
      typeof turn.advantages === "number" && fact("advantage", number(turn.advantages)),
      many && fact("reward", number(turn.reward)), many && partsOf(turn.parts),
      turn.calls.map(called),
      turn.defect && h("span", { class: "failed" }, `no action: ${turn.defect}`)),
    shownMessages(turn, index === 0),
    h("div", { class: "message" }, h("div", { class: "role" }, "completion"),
      turn.ids.length ? tokens(turn) : h("div", { class: "text" }, turn.completion)));
}

/* In a line there is no room for the text of tool calls. */
const withoutCalls = (text) => text.replace(/<\|?tool_call>[^]*?(<\/tool_call>|<tool_call\|>)/g, "[call]");

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
function legend(hasRatios, redraw) {
  const choice = h("select", { id: "coloring", onchange: (e) => { coloring = e.target.value; redraw(); } },
    [["logprob", "log-prob when sampled"], hasRatios && ["ratio", "ratio, trainer over sampler"], ["none", "nothing"]]
      .filter(Boolean).map(([value, text]) => h("option", { value, selected: value === coloring }, text)));
  const scale = scales[coloring]?.();
  return h("div", { class: "legend" }, h("label", {}, "Color tokens by ", choice),
    scale && h("span", {}, scale[0] + " "), scale && h("span", { class: "scale" }, scale[1].map((c) => h("span", { class: c }))),
    scale && h("span", {}, " " + scale[2]),
    h("span", {}, h("kbd", {}, "←"), " ", h("kbd", {}, "→"), " previous, next"));
}

/* The first images, the question, the answer and the right answer of a short episode, side by side. */
function glance(t) {
  if (t.turns.length > 3) return null;
  const [turn] = t.turns, asked = turn.parsed.filter((m) => m.role !== "system").map((m) => textOf(m.content).trim()).filter(Boolean).join("\n");
  const said = t.turns.map((each) => each.completion.trim()).join("\n› ") || "(empty)";
  const line = (name, text) => text && h("div", {}, h("dt", {}, name), h("dd", { class: "text" }, begins(text, 1200)));
  return h("div", { class: "glance" }, imageGrid(t.turns.flatMap((each) => each.images).filter((key, i, all) => all.indexOf(key) === i).slice(0, 4)),
    h("dl", {}, line("prompt", asked), line("answer", said), line("right answer", data.answer)));
}

/* Everything about a trajectory, `extra` below its head; `select` shows another one of its group. */
function trajectoryParts(t, group, select, redraw, extra = []) {
  return [
    h("div", { class: "heading" }, h("span", { class: "id" }, t.task), pill(t.reward),
      t.truncated && h("span", { class: "failed" }, "out of turns or of context")),
    glance(t),
    h("dl", { class: "figures" }, ...Object.entries({ trajectory: t.id, group: t.group, environment: t.environment, split: t.split,
      ...(t.step === null ? {} : { step: t.step }), ...Object.fromEntries(Object.entries(t.parts).map(([k, v]) => [`reward: ${k}`, number(v)])) })
      .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value))))),
    group.length > 1 ? h("div", { class: "siblings" }, h("span", { class: "soft" }, "Its group: "),
      group.map((other) => h("button", { type: "button", class: "pill" + shade(other.reward), title: other.id,
        "aria-current": String(other === t), onclick: () => select(other) }, number(other.reward)))) : null,
    ...extra,
    outline(t),
    legend(t.turns.some((turn) => turn.ratios), redraw),
    ...t.turns.map((turn, i) => turnCard(turn, i, t)),
  ].filter(Boolean);
}
