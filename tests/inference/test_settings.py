"""Sampling that biases importance ratios is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from pydantic import ValidationError

from components.contracts.errors import ConfigurationError
from components.inference.settings import EvaluationSamplingSettings, SamplingSettings

Factory = Callable[..., SamplingSettings]


def test_neutral_values_are_taken(sampling_factory: Factory) -> None:
    assert sampling_factory(temperature=0.7, top_k=-1).temperature == 0.7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.5),
        ("top_p", 1.5),
        ("top_k", 50),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
    ],
)
def test_biased_sampling_is_refused_with_the_reason(sampling_factory: Factory, name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} = .*biased") as caught:
        sampling_factory(**{name: value})
    assert caught.value.where == f"sampling.{name}"
    assert f"set {name} =" in caught.value.remedy


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.0), ("max_tokens", 0), ("best_of", 2)])
def test_impossible_values_are_refused(sampling_factory: Factory, name: str, value: float) -> None:
    with pytest.raises(ValidationError):
        sampling_factory(**{name: value})


def test_evaluation_may_be_greedy() -> None:
    settings = EvaluationSamplingSettings(temperature=0.0, max_tokens=8, top_p=0.9, top_k=20)
    assert settings.temperature == 0.0


def test_importing_settings_is_quick() -> None:
    code = "import sys, components.inference.settings; print('torch' in sys.modules, 'httpx' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
