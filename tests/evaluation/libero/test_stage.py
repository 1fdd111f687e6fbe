from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np

from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact, StageContext, StageReport
from armature.components.evaluation.libero.results import read_results
from armature.components.evaluation.libero.robot import refuse_cameras
from armature.components.evaluation.libero.settings import CompareLiberoSettings, EvaluateLiberoStageSettings
from armature.components.evaluation.libero.stage import compare_libero, evaluate_policy
from armature.components.stages import TerminalEvents, ThreadUnits
from tests.environments.libero.simulated import simulator
from tests.evaluation.libero.playground import TASKS, Homing, Plane, settings
from tests.refusals import refused

SIMULATOR = simulator(camera_name_mapping={"agentview_image": "image", "robot0_eye_in_hand_image": "wrist_image"})


class Events(TerminalEvents):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.numbers: dict[str, float] = {}

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None:
        self.lines.append(f"{name} {done}/{total}")

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.numbers.update(values)

    def message(self, text: str) -> None:
        self.lines.append(text)


def context(folder: Path, events: Events, **machine: Any) -> StageContext:
    facts = Machine(store=str(folder / "store"), **machine)
    (folder / "work").mkdir(exist_ok=True)
    return StageContext(facts, events, ThreadUnits(), folder / "work", folder / "images", "f")


def evaluate(folder: Path, policy: Homing, plane: Plane, **changes: Any) -> tuple[Path, Events, StageReport]:
    folder.mkdir(exist_ok=True)
    out, events = folder / "out", Events()
    out.mkdir()
    chosen = EvaluateLiberoStageSettings(simulator=SIMULATOR, evaluation=settings(**changes))
    report = evaluate_policy(policy, {"libero_spatial": TASKS}, [plane], chosen, out, context(folder, events))
    return out, events, report


def test_an_evaluation_leaves_results_numbers_videos_and_a_page(tmp_path: Path) -> None:
    out, events, report = evaluate(tmp_path, Homing(), Plane(deaths=(7,)), batch=3)
    results = read_results(out)
    numbers = json.loads((out / "metrics.json").read_text())
    info = json.loads((out / "eval_info.json").read_text())
    solved = sum(result.success for result in results)
    assert numbers["success"] == solved / 21 == info["overall"]["avg_max_reward"]
    assert events.numbers["success"] == numbers["success"]
    assert events.lines[20] == "episodes 21/21"
    videos = sorted(str(path.relative_to(out)) for path in out.rglob("*.mp4"))
    assert sorted(info["overall"]["video_paths"]) == videos
    assert report.rows == {"episodes": 21, "videos": len(videos)}
    assert list(report.drops) == ["attempts lost with their simulator"]
    page = (out / "report.html").read_text()
    assert all(f'href="{video}"' in page for video in videos)
    assert page.count("data:image/webp") == len(videos)
    assert "reach number 2" in page


def evaluated_twice(folder: Path, **changes: Any) -> dict[str, Artifact]:
    """Evaluations of two policies, of which the second has less noise."""
    paths = {}
    for name, noise in (("first", 1.4), ("second", 0.5)):
        out, _, _ = evaluate(folder / name, Homing(noise), Plane(), **changes)
        paths[name] = Artifact(kind="evaluate-libero", path=out, digest=name * 3)
    (folder / "compared").mkdir()
    return paths


def test_two_policies_are_compared_on_the_same_episodes(tmp_path: Path) -> None:
    paths, events = evaluated_twice(tmp_path, videos_per_task=0), Events()
    settings = CompareLiberoSettings(confidence=0.95)
    report = compare_libero(settings, paths, tmp_path / "compared", context(tmp_path, events))
    compared = json.loads((tmp_path / "compared/comparison.json").read_text())
    first, second = (read_results(paths[name].path) for name in ("first", "second"))
    turned = sum(b.success and not a.success for a, b in zip(first, second, strict=True))
    assert compared["all"]["only_second"] == turned > 0
    assert list(compared) == ["all", "libero_spatial", *(f"libero_spatial/{k}" for k in range(3))]
    assert report.rows == {"pairs": 21, "videos": 0}
    assert events.numbers["p_value"] == compared["all"]["p_value"] < 0.05
    assert "second, secondse against first, firstfir" in (tmp_path / "compared/report.html").read_text()


def test_what_both_filmed_is_shown_side_by_side(tmp_path: Path) -> None:
    paths, out = evaluated_twice(tmp_path), tmp_path / "compared"
    report = compare_libero(CompareLiberoSettings(), paths, out, context(tmp_path, Events()))
    filmed = [{str(path.relative_to(each.path)) for path in each.path.rglob("*.mp4")} for each in paths.values()]
    both = sorted(set.intersection(*filmed))
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*.mp4")) == both
    assert {f"videos/libero_spatial_{task}/eval_episode_0.mp4" for task in range(3)} <= set(both)
    assert report.rows["videos"] == len(both)
    page = (out / "report.html").read_text()
    for path in both:
        shown, left, right = (frames(folder / path) for folder in (out, paths["first"].path, paths["second"].path))
        assert len(shown) == max(len(left), len(right)) and f'href="{path}"' in page
        assert shown[0].shape == (16, 72, 3)
        for here, there in ((shown[0][:, :28], left[0][:, :28]), (shown[-1][:, 44:], right[-1][:, 4:])):
            assert np.abs(here.astype(int) - there).mean() < 6  # encoded twice


def frames(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as video:
        return [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]


def test_cameras_that_the_simulator_does_not_give_are_refused() -> None:
    refuse_cameras(("observation.images.wrist_image",), SIMULATOR)
    with refused("simulator_camera_missing", "observation.images.image2", "simulator.camera_name_mapping"):
        refuse_cameras(("observation.images.image", "observation.images.image2"), SIMULATOR)
