"""Weight of the project: `python -m tests.size` prints code lines, files, packages and words.

Code lines are the lines that hold a token of the program: docstrings, comments and blank lines are free, so that
explaining costs nothing. Only files that git tracks count.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

from setuptools import find_packages

from armature.setup.__main__ import NAMES

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("armature", "components", "tasks", "flows")
LAYOUT = (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER)
PROSE = re.compile(r"\bmatch=|\bin str\((?:error|caught|failure|raised|excinfo)\b")
SHORT_FILE, LONG_INIT = 60, 40


def tracked(*patterns: str) -> list[Path]:
    """Return the files that git tracks in this project and that match one of git's `patterns`."""
    listing = subprocess.run(["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, check=True)
    return [ROOT / name for name in listing.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines that docstrings cover, including docstrings of attributes."""
    return {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def code_lines(text: str) -> int:
    """Return the number of code lines in the text of a Python file: without docstrings, comments and blank lines.

    Example:
        >>> code_lines('"Title."\\n\\n# why\\nx = (\\n    1\\n)\\n')
        3
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(text)))


def longest_function(text: str) -> int:
    """Return the number of lines of the longest function in the text of a Python file, from `def` to its end."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return max(((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions), default=0)


def figures() -> Iterator[tuple[str, int]]:
    """Yield the measured numbers of the project with their labels, in the order in which they are printed."""
    files = tracked(*(f"{name}/*.py" for name in PRODUCT))
    texts = {path: path.read_text() for path in files}
    lengths = {path: text.count("\n") for path, text in texts.items()}
    tests = [path.read_text() for path in tracked("tests/*.py")]
    inside = [path.relative_to(ROOT / "components").parts for path in files if path.is_relative_to(ROOT / "components")]
    yield "code lines (armature, components, tasks, flows)", sum(map(code_lines, texts.values()))
    yield "all lines", sum(lengths.values())
    yield "files", len(files)
    short = (path for path in files if path.name != "__init__.py" and lengths[path] < SHORT_FILE)
    # A model family is one file, however short it is.
    yield f"files under {SHORT_FILE} lines", sum(path.parent.name != "families" for path in short)
    inits = (path for path in files if path.name == "__init__.py")
    yield f"__init__ over {LONG_INIT} lines", sum(lengths[path] > LONG_INIT for path in inits)
    yield "packages in components", len({parts[0] for parts in inside if len(parts) > 1})
    yield "loose modules in components", sum(len(parts) == 1 and parts != ("__init__.py",) for parts in inside)
    yield "longest file", max(lengths.values())
    yield "longest function", max(map(longest_function, texts.values()))
    former = re.compile(r"\bexclude_if=|\bFORMER\b")
    yield "mentions of exclude_if and FORMER", sum(len(former.findall(text)) for text in texts.values())
    yield "lines of prefect.yaml", sum(path.read_text().count("\n") for path in tracked("prefect.yaml"))
    yield "lines of tests", sum(text.count("\n") for text in tests)
    yield "places where tests assert on prose", sum(len(PROSE.findall(text)) for text in tests)
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    wheel = find_packages(ROOT, include=setuptools["packages"]["find"]["include"])
    yield "top-level names in the wheel", len({name.split(".")[0] for name in wheel})
    yield "environments", len(set(NAMES.values()))
    yield "words of the documentation", sum(len(path.read_text().split()) for path in tracked("*.md"))


if __name__ == "__main__":
    for name, value in figures():
        print(f"{value:>9,}  {name}")
