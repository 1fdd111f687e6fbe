"""Episodes of an evaluation in LIBERO per minute: several at once with one policy against one after the other."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from armature.components.robots.evaluation.episode import EvaluationJournal
from armature.components.robots.evaluation.run import Evaluation
from armature.components.robots.evaluation.schedule import plan_episodes
from armature.components.robots.evaluation.settings import LiberoEvaluationSettings
from armature.components.robots.libero.processes import SimulatorProcess
from armature.components.robots.libero.tasks import suite_tasks
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import load_policy
from armature.components.robots.policies.molmoact2.checkpoints.tiny import make_tiny_policy
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy
from armature.components.robots.policies.settings import RobotPolicySettings
from benchmarks.libero import settings as simulator_settings
from benchmarks.processor import CAMERAS, POLICY, ROBOT, TINY
from benchmarks.table import Row, alternate

EPISODES, STEPS, BATCH, ROUNDS = 4, 40, 4, 3
SUITE = "libero_spatial"


def measure() -> list[Row]:
    cameras = dict(zip(("agentview", "robot0_eye_in_hand"), (name.rpartition(".")[2] for name in CAMERAS), strict=True))
    simulator = simulator_settings(resolution=64, camera_name_mapping=cameras)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as scratch,
        SimulatorProcess(simulator, 600.0) as first,
        SimulatorProcess(simulator, 600.0) as second,
    ):
        policy, journals = tiny_policy(Path(scratch)), itertools.count()

        def rate(batch: int, simulators: Sequence[SimulatorProcess]) -> float:
            journal = EvaluationJournal(Path(scratch) / f"{next(journals)}.jsonl")
            settings = _settings(batch)
            planned = plan_episodes(settings, {SUITE: suite_tasks(SUITE)})
            began = time.perf_counter()
            Evaluation(settings, planned, journal, lambda finished, latest: None).run(policy, simulators)
            return 60 * EPISODES / (time.perf_counter() - began)

        rate(BATCH, [first, second])  # every simulator is built from here on
        rates = alternate(ROUNDS, lambda: rate(BATCH, [first, second]), lambda: rate(1, [first]))
    torch.set_num_threads(threads)
    note = (
        f"{EPISODES} episodes of {STEPS} actions in chunks of 10, a tiny MolmoAct2, {os.cpu_count()} cores, wall time"
    )
    what = f"episodes, {BATCH} at once in two processes"
    return [
        Row(what, rates.ours, rates.baseline, "one by one in one process", "/min", "higher", note, rates.spread),
    ]


def tiny_policy(scratch: Path) -> MolmoAct2Policy:
    """Return a policy with random weights and small images. It never succeeds, so all episodes have the same length."""
    settings = RobotPolicySettings(**{**POLICY, "tiny": {**TINY, "image_side": 56}})
    loaded = load_policy(make_tiny_policy(scratch / "policy", settings), settings, ROBOT)
    return MolmoAct2Policy(loaded.model, loaded.processor(), loaded.settings, "continuous", rows=1)


def _settings(batch: int) -> LiberoEvaluationSettings:
    return LiberoEvaluationSettings(
        suites=(SUITE,),
        tasks=(0,),
        episodes_per_task=EPISODES,
        max_steps={SUITE: STEPS},
        inference_action_mode="continuous",
        eval_seed=0,
        per_episode_seed=True,
        seed=0,
        batch=batch,
        rows_per_pass=1,
        attempts=1,
        failed_episodes=0,
        videos_per_task=0,
        video_fps=20,
    )
