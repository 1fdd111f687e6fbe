const POLL = 1000;  /* milliseconds */
const PAGE = 100;   /* rows */
const TABS = ["curves", "rollouts", "tasks", "compare", "failures"], ROBOT_TABS = ["curves", "episodes", "failures", "videos"];
const FILTERS = ["find", "outcome", "task", "initial_state", "group", "first_step", "last_step", "low", "high", "sort"];
const given = new URLSearchParams(location.hash.slice(1));
let wanted = given.get("run"), runs = [], run = null, tab = "curves", seen = "", chosen = false;
let rows = [], total = 0, current = null, asked = 0, opened = 0;

const saved = typeof exported === "undefined" ? null : exported;
async function ask(path, parameters = {}) {
  if (saved) return saved.ask(path, parameters);
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value !== null));
  const response = await fetch(`${path}?${query}`);
  if (!response.headers.get("content-type")?.startsWith("application/json")) throw new Error(await response.text());
  const answer = await response.json();
  if (answer.error) throw new Error(answer.error);
  return answer;
}
const api = (id, what) => `/api/runs/${id}/${what}`;
const groupOf = async (id, source, step, group) => {
  const answer = await ask(api(id, `groups/${source}/${step}/${encodeURIComponent(group)}`));
  answer.trajectories.forEach(digest);
  return answer;
};
const filters = (offset = 0) => ({
  ...Object.fromEntries(FILTERS.filter((name) => !$(name).closest("label").hidden).map((name) => [name, $(name).value.trim()])), offset, limit: PAGE });
const whole = (value) => Number(value ?? 0).toLocaleString("en");
const short = (text, most = 400) => (text.length > most ? `${text.slice(0, most)} …` : text);
const byId = (id) => runs.find((each) => each.id === id);

/* ---- the runs, and what is new ---- */

async function poll() {
  try {
    const answer = await ask("/api/runs");
    runs = answer.runs;
    if (wanted) pick(runs.find((each) => each.id.startsWith(wanted)));
    else if (!run) pick(headOf(runs.find((each) => each.rollouts) || runs[0]));
    run = (run && byId(run.id)) || run;
    drawRuns();
    if (saved) state("", saved.note);
    const problems = Object.keys(answer.problems).length;
    if (!saved) state(run && !run.finished ? "live" : "", !run ? (wanted ? `run ${wanted} has not begun` : "no run yet")
      : problems ? `${plural(problems, "table")} could not be read` : run.finished ? "finished" : "following");
    $("state").title = Object.entries(answer.problems).map((each) => each.join(": ")).join("\n");
    const now = run ? JSON.stringify([run, ...Object.keys(run.evaluations).map((id) => byId(id)?.rollouts)]) : "";
    if (now !== seen) {
      seen = now;
      await refresh(false);
    }
  } catch (error) {
    state("lost", `no answer: ${error.message}`);
  }
  if (!saved) setTimeout(poll, POLL);
}
function state(kind, text) {
  $("state").className = kind;
  $("state").textContent = text;
}
const tabsOf = (each) => saved?.tabs ?? (each.robot ? ROBOT_TABS : TABS);
const trainingOf = (each) => runs.find((other) => each.id in other.evaluations);
/* The training to which a run belongs, or the run itself. */
const headOf = (each) => (each && trainingOf(each)) ?? each;
function nameOf(each) {
  const training = trainingOf(each);
  const of = training ? `evaluation ${training.evaluations[each.id]} ${training.id.slice(0, 8)}` : null;
  return [each.recipe || `${each.stage}: ${each.title}`, of ?? (each.recipe && !each.recipe.startsWith(`${each.stage}/`) ? each.stage : null), new Date(each.began * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }), each.id.slice(0, 8)].filter(Boolean).join(" · ");
}
function fill(select, groups) {
  const text = JSON.stringify(groups);
  if (select.dataset.options === text) return;
  const before = select.value, option = ([value, name]) => h("option", { value }, name);
  select.dataset.options = text;
  select.replaceChildren(...groups.flatMap(([name, options]) => (name ? [h("optgroup", { label: name }, options.map(option))] : options.map(option))));
  if (groups.some(([, options]) => options.some(([value]) => value === before))) select.value = before;
}
function drawRuns() {
  const heads = [...new Set(runs.map(headOf))];
  const groups = heads.map((head) => [head, ...runs.filter((each) => each !== head && headOf(each) === head)]);
  fill($("run"), groups.map((group) => [group.length > 1 ? nameOf(group[0]) : "", group.map((each) => [each.id, nameOf(each)])]));
  fill($("source"), [["", run ? sources() : []]]);
  $("source").closest("label").hidden = hidden($("source")) || $("source").options.length < 2;
  const sides = runs.map((each) => [nameOf(each), sidesOf(each)]).filter(([, options]) => options.length);
  for (const select of [$("first"), $("second")]) fill(select, sides);
  if (!run) return;
  $("tabs").hidden = tabsOf(run).length < 2;
  for (const button of $("tabs").children) button.hidden = !tabsOf(run).includes(button.dataset.tab);
  if (!tabsOf(run).includes(tab)) return show("curves");
  if (!chosen) [$("first").value, $("second").value] = usual();
  $("run").value = run.id;
  if (saved) return;
  $("export").href = api(run.id, "page");
  $("export").hidden = !run.finished;
  const steps = run.last_step === null ? "–" : run.steps ? `${run.last_step} of ${run.steps}` : null;
  const accuracy = ["before training", "after training"].map((when) => byId(Object.keys(run.evaluations).find((id) => run.evaluations[id] === when))?.accuracy);
  const figures = { ...(steps && { step: steps }), ...(accuracy.every(Number.isFinite) && { accuracy: accuracy.map((each) => number(each, 3)).join(" → ") }), [run.robot ? "episodes" : "rollouts"]: whole(run.rollouts), failures: whole(run.failures) };
  $("figures").replaceChildren(...Object.entries(figures).map(([name, value]) =>
    h("div", {}, h("dt", {}, name), h("dd", { id: `figure-${name}` }, value))));
}
function pick(next) {
  if (!next) return;
  [run, wanted, seen, current, chosen] = [next, null, "", null, false];
  $("list").scrollTop = 0;
  remember();
}
function remember() {
  if (run && !saved) history.replaceState(null, "", `#${new URLSearchParams({ run: run.id.slice(0, 12), tab })}`);
}

/* ---- who played: a training, its held-out tasks between steps, an evaluation ---- */

function sources() {
  if (!run.steps) return [["evaluation", "evaluation"]];
  const evaluations = Object.entries(run.evaluations).filter(([id]) => byId(id)?.rollouts);
  return [["train", "in training"], ...(run.heldout_steps.length ? [["heldout", "held-out tasks"], ["", "training and held-out"]] : []),
    ...evaluations.map(([id, when]) => [`of ${id}`, `evaluation ${when}`])];
}
function played() {
  const value = $("source").value;
  return value.startsWith("of ") ? { id: value.slice(3), source: "evaluation" } : { id: run.id, source: value };
}
function moment(row) {
  if (row.source === "train") return `training step ${row.step}`;
  if (row.source === "heldout") return row.step ? `held-out after step ${row.step}` : "held-out before step 1";
  return `evaluation ${run.evaluations[row.run] ?? ""}`;
}
function sidesOf(each) {
  if (!each.rollouts || each.robot) return [];
  if (!each.steps) return [[`${each.id}:evaluation`, trainingOf(each)?.evaluations[each.id] ?? "its evaluation"]];
  return [...each.heldout_steps.map((step) => [`${each.id}:heldout:${step}`, step ? `held-out after step ${step}` : "held-out before step 1"]), [`${each.id}:train`, "its training rollouts"]];
}
/* What is compared unless something is chosen: a training's first and last held-out evaluation, or before and after it. */
function usual() {
  const sides = sidesOf(run).map(([value]) => value), training = run.steps ? run : trainingOf(run);
  if (run.heldout_steps.length > 1) return [sides[0], sides[run.heldout_steps.length - 1]];
  const of = (when) => Object.entries(training?.evaluations ?? {}).find(([id, each]) => each === when && byId(id)?.rollouts)?.[0];
  if (of("before training") && of("after training")) return [`${of("before training")}:evaluation`, `${of("after training")}:evaluation`];
  const other = runs.find((each) => each.id !== run.id && each.stage === run.stage && each.rollouts) ?? run;
  return [sidesOf(other).at(-1)?.[0] ?? "", sides.at(-1) ?? ""];
}

/* ---- tabs ---- */

const hidden = (control) => !control.closest("label").dataset.tabs.split(" ").includes(tab);
function show(name) {
  [tab, current, rows] = [name, null, []];
  opened += 1;
  for (const button of $("tabs").children) button.setAttribute("aria-selected", String(button.dataset.tab === tab));
  for (const label of $("filters").querySelectorAll("label")) label.hidden = hidden(label.firstElementChild);
  $("curves").hidden = tab !== "curves";
  $("panes").hidden = !(tab in lists);
  $("table").hidden = tab !== "failures";
  $("filters").hidden = tab === "curves";
  $("clear").hidden = tab === "videos";
  $("list").replaceChildren();
  $("detail").replaceChildren();
  drawRuns();
  remember();
  refresh(true);
}

/* Ask again for what is shown. A list that someone has scrolled or paged is left alone when `changed` is false. */
async function refresh(changed) {
  if (!run) return;
  const turn = ++asked, shown = tab;
  try {
    if (!changed && (rows.length > PAGE || $("list").scrollTop > 0) && shown in lists) return;
    const answer = await { curves: () => ask(api(run.id, "history")), failures: () => page("failures") }[shown]?.() ?? await lists[shown].ask(0);
    if (turn !== asked) return;
    if (shown === "curves") drawCurves(saved ? answer : [answer]);
    else if (shown === "failures") drawFailures(answer);
    else drawList(answer, false);
  } catch (error) {
    if (turn === asked) $("count").textContent = error.message;
  }
}
const page = (what, offset = 0) => ask(api(played().id, what), { ...filters(offset), source: played().source });

function drawCurves(curves) {
  const charts = curves.flatMap(({ panels, rows }) => panels.map((panel) => chart(panel, rows))).filter(Boolean);
  $("charts").replaceChildren(...(charts.length || saved ? charts : [h("p", { class: "empty" },
    run.steps ? "No step is done yet." : `An evaluation has no curves: see its ${run.robot ? "videos" : "rollouts"}.`)]));
}
function drawFailures(answer) {
  $("count").textContent = [plural(answer.total, "failure"), ...answer.reasons.map((each) => `${each.reason} ${whole(each.count)}`)].join(", ");
  const names = ["step", "reason", "task", run.robot ? "episode" : "rollout", "detail"];
  const line = (r) => h("tr", {}, h("td", {}, String(r.step)), h("td", { class: "failed" }, r.reason), h("td", {}, r.task_id),
    h("td", { class: "mono" }, r.trajectory_id), h("td", { class: "text mono" }, r.detail));
  $("table").replaceChildren(answer.rows.length ? h("table", { class: "plain" }, h("thead", {}, h("tr", {}, names.map((name) => h("th", {}, name)))),
    h("tbody", {}, answer.rows.map(line))) : h("p", { class: "empty" }, `No ${run.robot ? "episode" : "rollout"} failed.`),
  answer.total > answer.rows.length ? h("p", { class: "empty" }, `The first ${whole(answer.rows.length)}; filter for others.`) : "");
}

/* ---- lists: rollouts, tasks, tasks of two checkpoints ---- */

const side = (name) => { const [id, source, step] = $(name).value.split(":"); return { id, source, step }; };
const lists = {
  rollouts: {
    ask: (offset) => page("rollouts", offset),
    key: (r) => `${r.source} ${r.step} ${r.trajectory_id}`,
    count: (a) => `${whole(a.total)} of ${whole(byId(played().id)?.rollouts)}` + (a.total ? `, mean reward ${number(a.mean)}` : ""),
    line: (r) => [r.task_id, (r.source === "evaluation" ? "" : r.source === "heldout" ? `held-out ${r.step} · ` : `step ${r.step} · `) + (withoutCalls(r.completion) || "(empty)"), [r.reward], r.image],
    open: openRollout,
  },
  tasks: {
    ask: (offset) => page("tasks", offset),
    key: (r) => r.task_id,
    count: (a) => `${plural(a.total, "task")}, the hardest first`,
    line: (r) => [r.task_id, [plural(r.rollouts, "rollout"), r.first_step < r.last_step && `${number(r.first_reward, 2)} → ${number(r.last_reward, 2)}`,
      r.equal_groups && `${whole(r.equal_groups)} of ${plural(r.groups, "group")} without signal`].filter(Boolean).join(" · "), [r.reward]],
    open: openTask,
  },
  compare: {
    ask: (offset) => ask("/api/compare", { find: $("find").value.trim(), first: $("first").value, second: $("second").value, offset, limit: PAGE }),
    key: (r) => r.task_id,
    count: (a) => `${plural(a.total, "task")} that both played; the second is better on ${whole(a.better)}, worse on ${whole(a.worse)}`,
    line: (r) => [r.task_id, `${short(r.first_completion.trim(), 60)} → ${short(r.second_completion.trim(), 60)}`, [r.first_reward, r.second_reward]],
    open: openPair,
  },
  ...globalThis.robotLists,
};
function drawList(answer, append) {
  const kind = lists[tab];
  rows = append ? [...rows, ...answer.rows] : answer.rows;
  total = answer.total;
  $("count").textContent = kind.count(answer);
  rewardRange(rows.flatMap((row) => kind.line(row)[2]));
  const more = h("button", { class: "button more", type: "button", onclick: async () => drawList(await kind.ask(rows.length), true) }, "More");
  const row = (r) => {
    const [name, said, rewards, image] = kind.line(r);
    return h("button", { class: "row", type: "button", "data-key": kind.key(r), "data-task": r.task_id, "data-step": r.step ?? null, onclick: () => open(r) },
      image && h("img", { class: "thumb", src: image, alt: "", loading: "lazy" }), h("span", {}, h("div", { class: "name" }, name), h("div", { class: "said" }, said)), h("span", { class: "pills" }, rewards.map(pill)));
  };
  $("list").replaceChildren(...rows.map(row), rows.length < total ? more : "", rows.length ? "" : h("p", { class: "empty" }, nothing()));
  const same = rows.find((r) => kind.key(r) === current);
  if (!rows.length) $("detail").replaceChildren();
  else if (!same || tab === "tasks") open(same ?? rows[0]);
  mark();
}
const nothing = () => (tab === "videos" ? "No episode was filmed yet." : tab === "compare" ? "No task was played by both." : run.rollouts ? "Nothing fits these filters." : "No rollout is there yet.");
function mark() {
  for (const element of $("list").querySelectorAll(".row")) element.setAttribute("aria-current", String(element.dataset.key === current));
}
async function open(row) {
  const turn = ++opened, again = lists[tab].key(row) === current;
  current = lists[tab].key(row);
  mark();
  try {
    const parts = await lists[tab].open(row);
    if (turn !== opened) return;
    $("hint").style.visibility = "hidden";
    $("detail").replaceChildren(...parts.filter(Boolean));
    if (!again) $("detail").scrollTop = 0;
  } catch (error) {
    if (turn === opened) $("detail").replaceChildren(h("p", { class: "failed" }, error.message));
  }
}

/* ---- one rollout and its group ---- */

async function openRollout(row) {
  const answer = await groupOf(played().id, row.source, row.step, row.group_id);
  data = { ...answer, omitted: {} };
  return rolloutParts(answer.trajectories.find((t) => t.id === row.trajectory_id) || answer.trajectories[0]);
}
function rolloutParts(t) {
  const select = (other) => { $("hint").style.visibility = "hidden"; $("detail").replaceChildren(...rolloutParts(other)); };
  const across = !saved && h("p", {}, h("button", { class: "button", type: "button", id: "across", onclick: () => showTask(t.task) }, "This task in every step"));
  return trajectoryParts(t, data.trajectories, select, () => select(t), [groupTable(t, select), across, truth(data.task)].filter(Boolean));
}
const rightAnswer = (answer) => answer && h("p", {}, h("span", { class: "soft" }, "right answer "), h("b", { class: "text" }, answer));
const truth = (task) => task && h("div", {}, h("span", { class: "soft" }, "What the environment knows of this task"), h("pre", { class: "truth" }, JSON.stringify(task, null, 1)));
/* The answers to one task side by side. */
function groupTable(t, select) {
  const names = [...new Set(data.trajectories.flatMap((each) => Object.keys(each.parts)))];
  const advantageOf = (each) => each.turns.map((turn) => turn.advantages).find((value) => value !== null);
  const advantageText = (value) => (typeof value === "number" ? number(value) : value ? "per token" : "–");
  const ratios = data.trajectories.some((each) => each.ratio > 0);
  const cells = (each) => [...names.map((name) => number(each.parts[name])), advantageText(advantageOf(each)), ...(ratios ? [each.ratio ? number(each.ratio) : "–"] : []), String(each.length)];
  const line = (each) => h("tr", { tabindex: 0, "aria-current": String(each === t), onclick: () => select(each) },
    h("td", { class: "answer" }, short(each.turns.map((turn) => turn.completion.trim()).join(" › "))), h("td", {}, pill(each.reward)),
    cells(each).map((text) => h("td", { class: "number" }, text)));
  const lost = (each) => h("tr", {}, h("td", { class: "answer" }, each.detail), h("td", { class: "failed" }, each.reason));
  const heads = ["answer", "reward", ...names, "advantage", ...(ratios ? ["largest ratio"] : []), "tokens"];
  return h("div", { class: "wide" }, h("table", { class: "plain group" }, h("thead", {}, h("tr", {}, heads.map((name, i) => h("th", { class: i > 1 ? "number" : null }, name)))),
    h("tbody", {}, data.trajectories.map(line), data.failures.map(lost))));
}

/* ---- one task in every step, and for two checkpoints ---- */

const prompt = (document_) => {
  data = { ...document_, omitted: {} };
  const [t] = document_.trajectories;
  return t ? h("article", { class: "turn" }, shownMessages(t.turns[0], true)) : null;
};
async function openTask(row) {
  const { rows: times } = await ask(api(run.id, "changes"), { task: row.task_id });
  const newest = times.at(-1), [answer] = newest.answers;
  const shown = await groupOf(newest.run, newest.source, newest.step, answer.group_id);
  const go = (time, each) => showRollouts(time, row.task_id, each);
  const line = (time) => h("tr", { "data-step": time.step, "data-source": time.source }, h("td", {}, moment(time)), h("td", {}, pill(time.reward)), h("td", { class: "number" }, whole(time.rollouts)),
    h("td", {}, h("div", { class: "answers" }, time.answers.map((each) => h("button", { type: "button", class: "said-here", onclick: () => go(time, each) },
      pill(each.reward), h("span", {}, short(each.answer.trim(), 240) || "(empty)"), each.n > 1 && h("span", { class: "soft" }, `× ${whole(each.n)}`))),
    time.different > time.answers.length && h("span", { class: "soft" }, `and ${plural(time.different - time.answers.length, "other")}`))));
  const curve = ["train", "heldout"].map((source) => ({ source, points: times.filter((time) => time.source === source) })).filter(({ points }) => points.length > 1)
    .map(({ source, points }) => chart({ title: source === "train" ? "Reward in training" : "Reward on held-out tasks", series: ["reward"] }, points));
  return [h("div", { class: "heading" }, h("span", { class: "id" }, row.task_id), pill(row.reward)), prompt(shown), rightAnswer(shown.answer), truth(shown.task),
    h("h2", {}, "How its answers changed"), curve.length ? h("div", { class: "charts" }, curve) : null,
    h("div", { class: "wide" }, h("table", { class: "plain times" }, h("thead", {}, h("tr", {}, ["played", "mean reward", "rollouts", "answers, the most frequent first"].map((name, i) => h("th", { class: i === 2 ? "number" : null }, name)))),
      h("tbody", {}, times.map(line))))];
}
async function openPair(row) {
  const sides = await Promise.all(["first", "second"].map((name) => groupOf(side(name).id, side(name).source, row[`${name}_step`], row[`${name}_group`])));
  const column = (name, i) => h("div", {}, h("h3", {}, $(name).selectedOptions[0]?.text, " ", pill(row[`${name}_reward`]),
    h("div", { class: "soft" }, $(name).selectedOptions[0]?.parentElement.label)),
  sides[i].trajectories.map((t) => h("article", { class: "turn said-by" }, h("div", { class: "bar" }, pill(t.reward), Object.entries(t.parts).map(([part, value]) => fact(part, number(value))), fact("tokens", String(t.length))),
    h("div", { class: "text" }, t.turns.map((turn) => turn.completion.trim()).join("\n› ") || "(empty)"))),
  sides[i].failures.map((f) => h("p", { class: "failed" }, `${f.reason}: ${f.detail}`)));
  return [h("div", { class: "heading" }, h("span", { class: "id" }, row.task_id)), prompt(sides[1]) ?? prompt(sides[0]), rightAnswer(sides[1].answer ?? sides[0].answer), truth(sides[1].task ?? sides[0].task),
    h("div", { class: "pair" }, column("first", 0), column("second", 1)),
    run.steps ? h("p", {}, h("button", { class: "button", type: "button", onclick: () => showTask(row.task_id) }, "This task in every step")) : null];
}
function showTask(task) {
  clear();
  if (run.steps) $("source").value = run.heldout_steps.length ? "" : "train";
  $("task").value = task;
  show("tasks");
}
function showRollouts(time, task, answer) {
  clear();
  $("source").value = time.run !== run.id ? `of ${time.run}` : time.source;
  $("task").value = task;
  if (time.source !== "evaluation") $("first_step").value = $("last_step").value = time.step;
  $("sort").value = "order";
  show("rollouts");
  current = lists.rollouts.key({ ...time, ...answer });
  open({ ...time, ...answer });
}

/* ---- controls ---- */

let typing = null;
const again = () => { current = null; refresh(true); };
const clear = () => { const kept = ["source", "first", "second"].map((id) => [id, $(id).value]); $("filters").reset(); for (const [id, value] of kept) $(id).value = value; };
$("tabs").addEventListener("click", (event) => { if (event.target.dataset.tab) show(event.target.dataset.tab); });
$("run").addEventListener("change", () => { pick(byId($("run").value)); drawRuns(); again(); });
$("filters").addEventListener("input", (event) => {
  if (["first", "second"].includes(event.target.id)) chosen = true;
  clearTimeout(typing);
  typing = setTimeout(again, 150);
});
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("clear").addEventListener("click", (event) => { event.preventDefault(); clear(); again(); });
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey || !(tab in lists)) return;
  const by = { ArrowRight: 1, ArrowDown: 1, j: 1, ArrowLeft: -1, ArrowUp: -1, k: -1 }[event.key];
  const place = rows.findIndex((row) => lists[tab].key(row) === current);
  const next = by && rows[Math.max(0, Math.min(rows.length - 1, place + by))];
  if (!next) return;
  event.preventDefault();
  open(next);
  $("list").querySelector("[aria-current=true]")?.scrollIntoView({ block: "nearest" });
});
show([...TABS, ...ROBOT_TABS].includes(given.get("tab")) ? given.get("tab") : "curves");
poll();
