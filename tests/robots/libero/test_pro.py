"""LIBERO-PRO's suites: files with known digests, and objects that are variants of LIBERO's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from armature.components.robots.evaluation.settings import LiberoEvaluationSettings
from armature.components.robots.libero.package import ASSETS, import_libero
from armature.components.robots.libero.pro import PRO_SUITES, VARIANTS, pro_language, register_variants
from armature.components.robots.libero.tasks import load_initial_states, suite_tasks
from tests.refusals import refused

from .simulated import needs_libero

pytestmark = needs_libero


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


@pytest.mark.skipif(ASSETS not in os.environ, reason="LIBERO-PRO's files are not installed")
@pytest.mark.parametrize("suite", PRO_SUITES)
def test_all_files_are_read(suite: str) -> None:
    tasks = suite_tasks(suite)
    assert [len(load_initial_states(task)) for task in tasks] == [50] * 10
