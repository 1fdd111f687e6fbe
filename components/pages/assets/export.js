/* An exported page holds one run: this answers from the data in the page as the server does from the store. */
const exported = (() => {
  const saved = JSON.parse($("data").textContent);
  const rows = saved.trajectories.map((t) => {
    digest(t);
    const texts = t.turns.flatMap((turn) => [...turn.parsed.map((m) => textOf(m.content)), turn.completion]);
    return { source: t.step === null ? "evaluation" : "train", step: t.step ?? 0, trajectory_id: t.id, group_id: t.group, task_id: t.task,
      reward: t.reward, tokens: t.length, logprob: t.surprise, ratio: t.ratio, completion: t.turns.map((turn) => turn.completion.trim()).join(" › ").slice(0, 1000),
      image: saved.images[t.turns.flatMap((turn) => turn.images)[0]]?.uri,
      text: [t.id, t.task, t.group, ...texts].join("\n").toLowerCase() };
  });
  const failures = saved.failures.map((f) => ({ step: "–", trajectory_id: f.id, task_id: f.task, reason: f.reason, detail: f.detail, text: Object.values(f).join("\n").toLowerCase() }));
  const steps = saved.trajectories.map((t) => t.step).filter((step) => step !== null);
  const last = steps.length ? steps.reduce((a, b) => Math.max(a, b)) : null;
  const run = { id: "page", stage: "", title: saved.title, steps: last, last_step: last, finished: true, began: 0, evaluations: {}, robot: false,
    rollouts: rows.length, failures: failures.length, heldout_steps: [] };
  const orders = {
    "newest": (a, b) => b.step - a.step,
    "order": () => 0,
    "reward-": (a, b) => b.reward - a.reward,
    "reward+": (a, b) => a.reward - b.reward,
    "length-": (a, b) => b.tokens - a.tokens,
    "surprise+": (a, b) => a.logprob - b.logprob,
    "ratio-": (a, b) => b.ratio - a.ratio,
  };
  const within = (value, low, high) => (!low || value >= +low) && (!high || value <= +high);
  const fits = (r, p) => (!p.find || r.text.includes(p.find.toLowerCase())) && (!p.task || r.task_id === p.task);
  const part = (found, p) => ({ total: found.length, rows: found.slice(p.offset, p.offset + p.limit) });
  const answers = {
    history: () => saved.curves,
    rollouts: (p) => {
      const found = rows.filter((r) => fits(r, p) && (!p.group || r.group_id === p.group) && within(r.step, p.first_step, p.last_step) && within(r.reward, p.low, p.high));
      return { ...part(found.sort(orders[p.sort]), p), mean: mean(found.map((r) => r.reward)) };
    },
    failures: (p) => {
      const found = failures.filter((f) => fits(f, p)), counts = new Map();
      for (const f of found) counts.set(f.reason, (counts.get(f.reason) ?? 0) + 1);
      return { ...part(found, p), reasons: [...counts].map(([reason, count]) => ({ reason, count })) };
    },
    groups: (p, source, step, group) => ({
      trajectories: saved.trajectories.filter((t) => t.group === group && (t.step ?? 0) === +step),
      failures: saved.failures.filter((f) => f.group === group), tokens: saved.tokens, images: saved.images }),
    runs: () => ({ runs: [run], problems: {} }),
  };
  const left = saved.omitted;
  return {
    tabs: ["curves", ...(rows.length ? ["rollouts"] : []), ...(failures.length ? ["failures"] : [])],
    note: [left.trajectories && `${plural(left.trajectories, "more rollout")} in the rollout tables`, left.images && `${plural(left.images, "image")} did not fit into the page`].filter(Boolean).join(", "),
    ask: (path, parameters) => {
      const [, , , , what, ...rest] = path.split("/");
      return answers[what ?? "runs"](parameters, ...rest.map(decodeURIComponent));
    },
  };
})();
