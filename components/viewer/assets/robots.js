/* Episodes of robot policies, and videos of the same beginning before and after a training. */

const ended = (solved) => h("span", { class: solved ? "pill r4" : "pill r0" }, solved ? "solved" : "not solved");
const outcome = (name) => h("span", { class: name === "solved" ? "pill r4" : "pill r0" }, name);

globalThis.robotLists = {
  episodes: {
    ask: async (offset) => {
      const answer = await ask(api(run.id, "episodes"), filters(offset));
      outcomes = answer.steps;
      return answer;
    },
    key: (r) => `${r.step} ${r.episode_id}`,
    count: (a) => `${whole(a.total)} of ${whole(run.rollouts)} episodes`,
    line: (r) => [`step ${r.step} · task ${r.task} · state ${r.initial_state}`, `${r.outcome} after ${plural(r.actions, "action")}`, [r.reward]],
    open: openEpisode,
  },
  videos: {
    ask: async () => {
      const { rows } = await ask(api(run.id, "videos"));
      return { rows, total: rows.length };
    },
    key: (r) => r.after.uri + (r.before?.uri ?? ""),
    count: (a) => `${plural(a.total, "episode")}, those that end otherwise first`,
    line: (r) => [`${r.suite} ${r.task} · episode ${r.episode}`, r.language, [r.before, r.after].filter(Boolean).map((side) => Number(side.solved))],
    open: openVideos,
  },
};
let outcomes = [];

async function openEpisode(row) {
  const episode = await ask(api(run.id, `episodes/${row.step}/${encodeURIComponent(row.episode_id)}`));
  const along = (title, series) => chart({ title, series, axis: "chunk" }, episode.answers.map((each) => ({ step: each.chunk, ...each })));
  const cells = (each) => [each.chunk, each.executed, number(each.value), number(each.logprob), number(each.reward), number(each.advantage)];
  const views = (each) => Object.entries(each.images).map(([camera, uri]) => h("img", { src: uri, alt: `${camera}, chunk ${each.chunk}`, title: camera, loading: "lazy" }));
  const names = ["seen", "chunk", "actions", "value", "log-prob", "reward", "advantage"];
  return [
    h("div", { class: "heading" }, h("span", { class: "id" }, episode.episode_id), outcome(episode.outcome), pill(episode.reward)),
    h("p", { class: "task" }, episode.language, h("span", { class: "soft" }, ` · task ${episode.task}, initial state ${episode.initial_state}, ${plural(episode.actions, "action")}`)),
    h("div", { class: "charts", id: "along" }, [along("Value along the episode", ["value"]), along("Mean log-prob along the episode", ["logprob"])].filter(Boolean)),
    h("div", { class: "wide" }, h("table", { class: "plain answers-of" }, h("thead", {}, h("tr", {}, names.map((name, i) => h("th", { class: i ? "number" : null }, name)))),
      h("tbody", {}, episode.answers.map((each) => h("tr", {}, h("td", {}, h("div", { class: "seen" }, views(each))), cells(each).map((text) => h("td", { class: "number" }, String(text)))))))),
    h("h2", {}, "Outcomes by step"), outcomeTable(),
  ];
}
/* A click on a step shows its episodes alone. */
function outcomeTable() {
  const only = (step) => { $("first_step").value = $("last_step").value = step; refresh(true); };
  const line = (each) => h("tr", { tabindex: 0, "data-step": each.step, onclick: () => only(each.step) },
    [each.step, each.solved, each.truncated, `${number(each.success, 2)} (${number(each.low, 2)} to ${number(each.high, 2)})`].map((text) => h("td", { class: "number" }, String(text))));
  return h("div", { class: "wide" }, h("table", { class: "plain", id: "outcomes" }, h("thead", {}, h("tr", {}, ["step", "solved", "truncated", "success, 95 % interval"].map((name) => h("th", { class: "number" }, name)))),
    h("tbody", {}, outcomes.map(line))));
}

async function openVideos(row) {
  const film = (name, side) => h("figure", { class: "film" }, h("figcaption", {}, name, " ", ended(side.solved), h("span", { class: "soft" }, ` after ${plural(side.steps, "action")}`)),
    h("video", { src: side.uri, controls: true, muted: true, playsinline: true, preload: "auto" }));
  const films = [row.before && film("before training", row.before), film(row.before ? "after training" : "evaluation", row.after)].filter(Boolean);
  const videos = films.map((each) => each.querySelector("video"));
  const both = () => { for (const video of videos) { video.currentTime = 0; video.play(); } };
  return [h("div", { class: "heading" }, h("span", { class: "id" }, `${row.suite} ${row.task}, episode ${row.episode}, initial state ${row.initial_state}`)),
    h("p", { class: "task" }, row.language), h("div", { class: "pair" }, films),
    videos.length > 1 && h("p", {}, h("button", { class: "button", type: "button", id: "both", onclick: both }, "Play both from the beginning"))];
}
