"""One word for one thing: class names are unique, and the glossary's last column does not occur in the product."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ("components", "armature", "flows", "tasks")
TEXT = {".py", ".toml", ".md", ".html", ".css", ".js", ".j2", ".sh", ".yaml"}
EXEMPT = re.compile(  # PyAV's name, and what a model is asked: results depend on it
    r"PictureType\.I|(?:What|Which) colour (?:is|was) \w+\?|Remember this picture\.|Look at the picture and say|"
    r"Where is the centre of the dot\?|go to a grey key"
)


def not_used() -> list[str]:
    glossary = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Glossary\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in glossary.splitlines() if line.startswith("|")]
    return [word for row in rows[2:] for word in re.findall(r"`([^`]+)`", row[-1])]


def pattern(word: str) -> re.Pattern[str]:
    stem, ending = (word[:-1], r"[a-z]*") if word.endswith("*") else (word, "")
    between = r"[\s_]+"  # of a phrase and of an identifier
    return re.compile(rf"(?<![A-Za-z]){between.join(map(re.escape, stem.split()))}{ending}(?![A-Za-z])", re.IGNORECASE)


def prose(text: str) -> str:
    """Return a source text in a form to search for words: CamelCase names are split, and lines, comments and adjacent
    string literals are joined."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", EXEMPT.sub("", text))
    text = re.sub(r"\"\s*\n\s*[rf]?\"", "", text)
    return re.sub(r"\s*\n\s*(?:#\s)?", " ", text)


@pytest.fixture(scope="module")
def product() -> dict[Path, str]:
    files = [path for folder in (*CODE, "configs") for path in (ROOT / folder).rglob("*")]
    return {path: prose(path.read_text()) for path in sorted(files) if path.suffix in TEXT}


def test_no_class_name_is_defined_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in (path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 300
    assert {name: result for name, result in places.items() if len(result) > 1} == {}


def test_glossary_is_parsed() -> None:
    assert len(not_used()) > 30 and "picture*" in not_used()


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("picture*", "class NoPicture:"),
        ("picture*", "per_picture = 1"),
        ("colour*", "# Colours of"),
        ("under way", '"requests under "\n    f"way"'),
        ("max dead ends", "max_dead_ends = 2"),
    ],
)
def test_finds_a_word_in_names_comments_and_strings(word: str, text: str) -> None:
    assert pattern(word).search(prose(text))


@pytest.mark.parametrize("word", not_used())
def test_avoided_words_do_not_occur(word: str, product: dict[Path, str]) -> None:
    one = pattern(word)
    hits = [f"{path.relative_to(ROOT)}: {m[0]}" for path, text in product.items() for m in one.finditer(text)]
    assert not hits, f"{len(hits)} hits; see the glossary in CONTRIBUTING.md: {hits[:10]}"
