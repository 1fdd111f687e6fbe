"""The Triton kernels on a CPU; `test_interpreted` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from components.contracts.errors import ConfigurationError
from components.vlm.heads import HEADS, HeadSettings, fused

from .logprob_cases import CASES, CPU, ODD, Case, check_unused, compare


@settings(max_examples=4, deadline=None)  # the conftest that says so is not loaded here
@given(case=CASES)
def test_any_size_equals_float64(case: Case) -> None:
    compare("triton", case, torch.float32, values=3e-5, gradients=3e-5)


@pytest.mark.parametrize("case", ODD)
def test_odd_sizes_equal_float64(case: Case) -> None:
    compare("triton", case, torch.float32, values=3e-5, gradients=3e-5)


def test_factors_loaded_by_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "FULL", replace(fused.FULL, descriptors=True))
    compare("triton", Case(70, 301, 48, 0.7, 30.0, True, 16), torch.float32, values=3e-5, gradients=3e-5)


def test_an_unused_entropy_or_logprob_has_no_part_in_the_gradient() -> None:
    check_unused("triton")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_type_that_would_give_other_numbers_is_refused(dtype: torch.dtype) -> None:
    head, hidden, targets, forbidden = Case(3, 20, 8).make(CPU, dtype)
    with pytest.raises(ConfigurationError, match="float32"):
        HEADS["triton"](HeadSettings(1.0, None, 4), head, CPU)(head, hidden, targets, forbidden)
