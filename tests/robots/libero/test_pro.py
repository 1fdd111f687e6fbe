"""LIBERO-PRO's suites: files with known digests, and objects that are variants of LIBERO's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from armature.components.robots.evaluation.settings import LiberoEvaluationSettings
from armature.components.robots.libero.package import ASSETS, import_libero
from armature.components.robots.libero.pro import PRO_SUITES, VARIANTS, base_suite, pro_language, register_variants
from armature.components.robots.libero.scripted.plans import is_scripted
from armature.components.robots.libero.scripted.policy import DemonstrationOutcome, demonstrate
from armature.components.robots.libero.simulator import LiberoSimulator
from armature.components.robots.libero.tasks import load_initial_states, suite_tasks
from tests.refusals import refused

from .simulated import needs_libero, simulator

pytestmark = needs_libero
needs_files = pytest.mark.skipif(ASSETS not in os.environ, reason="LIBERO-PRO's files are not installed")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    for function in (suite_tasks, pro_language):
        function.cache_clear()


def test_missing_files_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ASSETS, raising=False)
    suite_tasks.cache_clear()
    with refused("assets_missing", "armature setup --libero-meshes"):
        suite_tasks("libero_goal_swap")


def test_rejects_task_file_with_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = suite_tasks("libero_goal")[0].name
    path = tmp_path / f"libero/libero/bddl_files/libero_goal_swap/{name}.bddl"
    path.parent.mkdir(parents=True)
    path.write_text("(:language do something else)")
    monkeypatch.setenv(ASSETS, str(tmp_path / "shapes/assets"))
    with refused("unknown_task_file", path):
        pro_language("libero_goal_swap", name)


def test_objects_are_registered_as_variants() -> None:
    import_libero()
    import libero.libero.envs  # noqa: F401
    from libero.libero.envs.base_object import OBJECTS_DICT

    register_variants()
    for name, base in VARIANTS.items():
        assert issubclass(OBJECTS_DICT[name], OBJECTS_DICT[base])


def test_variants_have_the_step_limits_of_their_suites() -> None:
    settings = LiberoEvaluationSettings(suites=("libero_10_swap",), max_steps={"libero_10": 520})
    assert settings.suites == ("libero_10_swap",)


SCRIPTED = {"libero_spatial": list(range(10)), "libero_object": list(range(10)), "libero_goal": [1, 2, 4, 6, 8]}


@needs_files
@pytest.mark.parametrize("suite", PRO_SUITES)
def test_scripted_policy_supports_the_same_goals(suite: str) -> None:
    expected = [2, 5, 6, 8, 9] if suite == "libero_goal_task" else SCRIPTED.get(base_suite(suite), [])
    assert [task.index for task in suite_tasks(suite) if is_scripted(task)] == expected


@needs_files
@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "index"), [("libero_goal_object", 8), ("libero_goal_task", 6), ("libero_goal_task", 9)]
)
def test_scripted_policy_solves_new_objects_and_goals(suite: str, index: int) -> None:
    made = LiberoSimulator(suite_tasks(suite)[index], simulator(num_steps_wait=10, assets=None))
    (outcome,) = demonstrate(made, 0, 0, noise=0.0, limit=300, watch=False)
    made.close()
    assert isinstance(outcome, DemonstrationOutcome) and outcome.success


@needs_files
@pytest.mark.parametrize("suite", PRO_SUITES)
def test_all_files_are_read(suite: str) -> None:
    tasks = suite_tasks(suite)
    assert [len(load_initial_states(task)) for task in tasks] == [50] * 10
