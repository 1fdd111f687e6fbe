"""Sampling that biases importance ratios is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from armature.components.inference.settings import EvaluationSamplingSettings
from tests.inference.conftest import make_sampling
from tests.refusals import refused


@pytest.mark.parametrize(
    "name", ["top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_training_has_no_setting_that_biases_ratios(name):
    with refused("extra_forbidden", name):
        make_sampling(**{name: 1})


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.0), ("max_tokens", 0), ("best_of", 2)])
def test_impossible_values_are_refused(name, value):
    with pytest.raises(ValidationError):
        make_sampling(**{name: value})


def test_evaluation_may_be_greedy():
    assert EvaluationSamplingSettings(temperature=0.0, max_tokens=8).temperature == 0.0
    with refused("value_error", "top_p", "top_k"):
        EvaluationSamplingSettings(temperature=0.0, max_tokens=8, top_p=0.9, top_k=20)


def test_importing_settings_is_quick():
    code = "import sys, armature.components.inference.settings; print('torch' in sys.modules, 'httpx' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
