"""Plain words: `python -m tests.words` counts what makes a sentence hard to read, and fails above the limit.

A docstring or comment that begins with a question word is usually a noun clause in place of a sentence, and a variable
named after a participle hides its role. The count helps to find such places; it does not replace a reader.

Example:
    $ python -m tests.words components/rl     # lists each place below a folder
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.size import ROOT, tracked

LIMIT = 60
"""Largest accepted number of places with hard words in the whole project, including tests."""
OPENINGS = re.compile(r"(What|Whether|Where|Which|Who|How|Of|Those|As|By|None)\b")
PHRASES = re.compile(r"\b(is none|that of|those of|whoever|Whoever|is no [A-Z]\w+)\b")
NAMES = frozenset({"said", "told", "found", "given", "known", "own", "kept"})
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, including docstrings of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment. Of consecutive comment lines, only the first is yielded."""
    previous = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if line != previous + 1:
                yield line, token.string.lstrip("#: ")
            previous = line


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each parameter and variable that the code binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def hard_words(text: str) -> list[tuple[int, str]]:
    """Return the line and the word of each place in a Python file that a reader may have to read twice.

    Example:
        >>> hard_words('"Whether it fits."\\nfound = 1\\n')
        [(1, 'Whether'), (2, 'found')]
    """
    tree = ast.parse(text)
    places = [(line, name) for line, name in bound_names(tree) if name in NAMES]
    for line, sentence in [*docstrings(tree), *comments(text)]:
        if opening := OPENINGS.match(sentence.strip()):
            places.append((line, opening[1]))
        places += [(line, phrase[1]) for phrase in PHRASES.finditer(sentence)]
    return sorted(places)


def documented(tree: ast.AST) -> Iterator[bool]:
    """Yield True or False for each public module, class and function in the tree: True if it has a docstring."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and not getattr(node, "name", "").startswith("_"):
            yield ast.get_docstring(node) is not None


def main(folders: list[str]) -> int:
    """Print the counts of hard words, and each place in `folders`. Return the exit code, which is 1 if there are more
    places than `LIMIT`."""
    counts: Counter[str] = Counter()
    has_docstring: list[bool] = []
    for path in tracked("*.py"):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        package = "/".join(Path(name).parts[:2])
        for line, word in hard_words(text):
            counts[package] += 1
            if any(name.startswith(folder) for folder in folders):
                print(f"{name}:{line}: {word}")
        if not name.startswith(("tests/", "benchmarks/")):
            has_docstring += documented(ast.parse(text))
    for package, number in counts.most_common():
        print(f"{number:>9,}  {package}")
    total = counts.total()
    print(f"{total:>9,}  places to read twice, at most {LIMIT}")
    print(f"{sum(has_docstring):>9,}  of {len(has_docstring):,} public modules, classes and functions have a docstring")
    return int(total > LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
