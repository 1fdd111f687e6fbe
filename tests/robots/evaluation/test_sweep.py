"""The stage compare-policies: pairs of policies that played the same episodes."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from armature.components.configuration import load_recipe
from armature.components.contracts.stages import Artifact
from armature.components.evaluation.wilson import wilson_interval
from armature.components.robots.evaluation.results import read_results
from armature.components.robots.evaluation.sweep import (
    ComparePoliciesSettings,
    PolicySweepSettings,
    compare_policies,
    holm,
    interval_chart,
)
from armature.components.robots.recipes import SweepPolicies
from tests.refusals import refused
from tests.robots.evaluation.playground import Homing, Plane
from tests.robots.evaluation.test_stage import Events, context, evaluate

NOISE = {"calm": 0.3, "middle": 0.9, "wild": 2.5}


@pytest.fixture
def evaluations(tmp_path: Path) -> dict[str, Artifact]:
    made = {}
    for name, noise in NOISE.items():
        out, _, _ = evaluate(tmp_path / name, Homing(noise), Plane(), videos_per_task=0)
        made[name] = Artifact(kind="evaluate-libero", path=out, digest=name)
    (tmp_path / "compared").mkdir()
    return made


def test_every_pair_is_compared_on_the_same_episodes(tmp_path, evaluations):
    settings = ComparePoliciesSettings(policies=tuple(NOISE))
    report = compare_policies(settings, evaluations, tmp_path / "compared", context(tmp_path, Events()))
    assert report.rows == {"policies": 3, "pairs": 3}
    document = json.loads((tmp_path / "compared/policies.json").read_text())
    solved = {name: [row.success for row in read_results(each.path)] for name, each in evaluations.items()}
    assert {name: row["success"] for name, row in document["policies"].items()} == {
        name: sum(each) / len(each) for name, each in solved.items()
    }
    for pair, (one, other) in zip(document["pairs"], combinations(NOISE, 2), strict=True):
        ends = list(zip(solved[one], solved[other], strict=True))
        lost, gained = ends.count((True, False)), ends.count((False, True))
        assert (pair["first"], pair["second"], pair["only_first"], pair["only_second"]) == (one, other, lost, gained)
        exact = binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
        assert pair["p_value"] == pytest.approx(exact) and pair["p_value"] <= pair["p_value_corrected"]
    bars = ElementTree.parse(tmp_path / "compared/policies.svg").getroot().findall("{*}rect[@height='18']")
    assert [float(bar.get("width", "")) / 400 for bar in bars] == pytest.approx(
        [sum(each) / len(each) for each in solved.values()], abs=1e-3
    )
    page = (tmp_path / "compared/report.html").read_text()
    assert "data:image/svg+xml" in page and all(name in page for name in NOISE)


def test_other_episodes_are_refused(tmp_path, evaluations):
    out, _, _ = evaluate(tmp_path / "fewer", Homing(), Plane(), videos_per_task=0, episodes_per_task=6)
    evaluations["fewer"] = Artifact(kind="evaluate-libero", path=out, digest="fewer")
    settings = ComparePoliciesSettings(policies=("calm", "fewer"))
    with refused("episodes_differ"):
        compare_policies(settings, evaluations, tmp_path / "compared", context(tmp_path, Events()))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_the_stepwise_test_rejects(values):
    """Independently: reject in increasing order while p <= level / (hypotheses that are left)."""
    corrected = holm(values)
    for level in (0.01, 0.05, 0.5):
        rejected, order = set(), sorted(range(len(values)), key=values.__getitem__)
        for rank, i in enumerate(order):
            if values[i] * (len(values) - rank) > level:
                break
            rejected.add(i)
        assert rejected == {i for i, p in enumerate(corrected) if p <= level}


def test_names_can_be_overridden_and_are_shown_whole():
    names = [f"{'a' * 39}{end}" for end in "bc"]
    chart = interval_chart(dict.fromkeys(names, wilson_interval(1, 2)))
    assert all(f">{name}<" in chart for name in names)
    with refused("string_pattern_mismatch"):
        PolicySweepSettings.model_validate({"policies": {"pi0.5": {}, "b": {}}})


def test_sources_of_each_policy_are_checked():
    recipe = load_recipe("evaluate/libero-sweep").values
    assert isinstance(recipe, SweepPolicies)
    served = load_recipe("evaluate/libero-openpi").sections["policy"]
    conventions = served.server.conventions.model_copy(update={"gripper_open": 1.0, "gripper_closed": -1.0})
    wrong = served.model_copy(update={"server": served.server.model_copy(update={"conventions": conventions})})
    sweep = recipe.sweep.model_copy(update={"policies": {"right": served, "wrong": wrong}})
    with refused("conventions_disagree", "sweep.policies.wrong.server.conventions"):
        recipe.model_copy(update={"sweep": sweep}).refuse_ahead()
