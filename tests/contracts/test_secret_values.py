"""No error shows a secret that this process has read."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armature.components.contracts.errors import (
    LONGEST_DETAIL,
    ArmatureError,
    ConfigurationError,
    RolloutFailed,
    blanked,
    keep_secret,
)
from armature.components.contracts.secrets import BLOCKS, BlockReference, EnvironmentReference, resolve

SECRETS = st.text(st.characters(codec="utf-8", exclude_characters="*"), min_size=4, max_size=40)


@pytest.fixture(autouse=True)
def no_secrets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("armature.components.contracts.errors._forms", set())
        yield


@given(secret=SECRETS, before=st.sampled_from(["", "key=", "x" * (LONGEST_DETAIL - 10)]))
def test_errors_blank_secrets(secret, before):
    keep_secret(secret)
    forms = [secret, json.dumps(secret)[1:-1], json.dumps(secret)[1:-1].replace("/", r"\/"), quote(secret, "")]
    for form in forms:
        text = f"{before}{form}!"
        for shown in (
            str(RolloutFailed("reason", text)),
            str(ArmatureError(text, where=text, remedy=text)),
            blanked(text),
        ):
            assert form not in shown.removeprefix("reason: ").replace(before, "")


def test_referenced_values_are_secrets(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "token-of-the-environment")
    monkeypatch.setitem(BLOCKS, "block", "token-of-the-block")
    variables = {
        "A": EnvironmentReference(env="SOME_TOKEN"),
        "B": BlockReference(prefect_secret="block"),
        "C": "plain-value",
    }
    values = resolve(variables, "machine")
    error = ConfigurationError(f"the program says {values}")
    assert "token-of" not in str(error) + error.what and "plain-value" in str(error)


@pytest.mark.parametrize("before", ["", "k", "user:", "Bearer "])
def test_base64_of_a_secret_is_blanked(before):
    keep_secret("sekrit+key&more ")
    encoded = b64encode(f"{before}sekrit+key&more".encode()).decode()
    for shown in (blanked(encoded), str(RolloutFailed("reason", f"sent {encoded}"))):
        left = re.sub(r"\W", "", shown.removeprefix("reason: sent "))
        assert "***" in shown and len(left) <= len(b64encode(before.encode())) + 4


@pytest.mark.parametrize(
    "form",
    ["sekrit+key&more", r"sekrit\u002bkey\u0026more", r"sekrit\u002Bkey\u0026more", "sekrit+key&amp;more",
     "sekrit%2Bkey%26more"],
)  # fmt: skip
def test_output_of_other_programs_is_blanked(form):
    keep_secret(" sekrit+key&more\n")
    assert blanked(f"sent {form}!") == "sent ***!"


@pytest.mark.parametrize("secret", ["sekrit\udc80key", "sekrit\ud800key"], ids=ascii)
def test_non_utf8_secrets_are_blanked(secret):
    keep_secret(secret)
    assert blanked(f"sent {secret}!") == "sent ***!"


def test_short_values_are_not_blanked():
    keep_secret("1")
    keep_secret("")
    assert blanked("status 401") == "status 401"
