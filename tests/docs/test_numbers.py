"""The pages quote the numbers of `docs/numbers.toml`, whose commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from armature import reproduce as module
from armature.components.configuration import load_recipe
from armature.reproduce import TABLE, QuotedNumber, read_numbers, read_value, selected
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = read_numbers()
COMPLETE = ("README.md", "docs/comparison.md", "docs/quickstart.md")
"""Pages whose numbers with an interval are all in the table."""


def plain(text: str) -> str:
    """Return a text with one space in place of each line break."""
    return " ".join(text.split())


@pytest.mark.parametrize("name", NUMBERS)
def test_page_quotes_the_number(name):
    number = NUMBERS[name]
    assert plain(number.text) in plain((ROOT / number.page).read_text()), f"change {TABLE} and {number.page} together"
    quoted = {float(each) for each in re.findall(r"(?<![\d.])\d+(?:\.\d+)?", number.text)}
    assert {number.value, number.low, number.high} <= quoted
    assert number.low <= number.value <= number.high


@pytest.mark.parametrize("page", COMPLETE)
def test_every_interval_of_the_page_is_in_the_table(page):
    quoted = plain(" ".join(number.text for number in NUMBERS.values() if number.page == page))
    intervals = re.findall(r"\d\.\d+ \[[\d., ]+\]", plain((ROOT / page).read_text()))
    assert [each for each in intervals if each not in quoted] == []


@pytest.mark.parametrize("name", [name for name, number in NUMBERS.items() if number.reads])
def test_command_is_valid_and_its_output_is_read(name):
    number = NUMBERS[name]
    assert re.compile(number.reads).groups == 1
    words = shlex.split(number.command.rpartition("&& ")[2])
    if words[:2] == ["armature", "run"] and not words[2].endswith(".toml"):
        load_recipe(words[2], [words[at + 1] for at, word in enumerate(words) if word == "--set"])
    change = "0.125 [0.1, 0.2] → 0.5 [0.4, 0.6]"
    output = f"accuracy 0.25; weights in a folder\naccuracy   {change}\nsuccess   {change}\n"
    assert read_value(number, output) in (0.125, 0.25, 0.5)
    with refused("number_missing"):
        read_value(number, "no such line")


def numbers(**changes: object) -> dict[str, QuotedNumber]:
    values = NUMBERS["colors/after"].model_dump() | {"reads": r"^is ([\d.]+)", "command": "echo is 0.96; echo x"}
    number = QuotedNumber.model_validate(values | changes)
    return {"a/one": number, "a/two": number, "b": number}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, ""),
        ({"value": 0.96}, ""),
        ({"low": 0.97}, "number_not_reproduced"),
        ({"command": "echo is 0.96; exit 3"}, "command_failed"),
        ({"command": "echo was 0.96"}, "number_missing"),
    ],
    ids=["within", "equal", "outside", "failed", "missing"],
)
def test_reproduce_runs_a_command_once_and_compares(monkeypatch, capsys, changes, code):
    monkeypatch.setattr(module, "read_numbers", lambda: numbers(**changes))
    if code:
        with refused(code):
            module.reproduce(["a"])
    else:
        module.reproduce(["a"])
        output = capsys.readouterr().out
        verdict = "equal" if changes else "within the interval"
        assert output.count("$ echo") == 1 and output.count(f": {verdict}\n") == 2


def test_names_and_groups_are_selected():
    assert list(selected(["a"], numbers())) == ["a/one", "a/two"]
    assert list(selected(["b", "a/two"], numbers())) == ["a/two", "b"]
    with refused("number_unknown", "a/on"):
        selected(["a/on"], numbers())
    by_hand = {"reads": ""}
    table = {name: each.model_copy(update={} if name == "a/one" else by_hand) for name, each in numbers().items()}
    assert list(selected(["a"], table)) == ["a/one"]
    with refused("number_unknown", "b"):
        selected(["b"], table)


def test_reproduce_lists_numbers(armature, monkeypatch):
    done = armature("reproduce")
    assert done.code == 0 and [line.split()[0] for line in done.stdout.splitlines()] == list(NUMBERS)
    monkeypatch.setattr(module, "CHECKOUT", None)
    assert "code: checkout_missing" in armature("reproduce").stderr
