"""The table of error codes: `python -m tests.error_table` writes docs/errors.md from the code that raises them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.size import PRODUCT, ROOT, tracked

PAGE = ROOT / "docs/errors.md"
HEAD = """# Error codes

Every error of Armature has a stable code, which the command line prints below it. Sentences may change from version to
version, codes do not. A setting that pydantic refuses has the type of
[pydantic's error](https://docs.pydantic.dev/latest/errors/validation_errors/) as its code, such as `extra_forbidden`
for an unknown key. The table is made from the code by `python -m tests.error_table`: the last column names a test that
raises the error, where there is one.

| code | error | meaning | what to do | shown by |
|---|---|---|---|---|
"""


@dataclass(frozen=True, order=True)
class Raised:
    """One place in the code that raises an error with `code`: the error's class, sentence and remedy.

    Parts of the texts that vary are written {name} or ….
    """

    code: str
    kind: str
    meaning: str
    remedy: str


def text_of(node: ast.expr | None) -> str:
    """Return the text of a string expression. A part that varies is written as its name in braces, or as … if it has
    no name."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(text_of, values))
        case ast.FormattedValue(value=ast.Name(id=name)) | ast.FormattedValue(value=ast.Attribute(attr=name)):
            return f"{{{name}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
        case ast.IfExp(body=body, orelse=orelse):
            return f"{text_of(body)} / {text_of(orelse)}"
        case None:
            return ""
    return "…"


def raised(tree: ast.AST) -> Iterator[Raised]:
    """Yield all errors with a code in a module's syntax tree: calls with `code=`, calls of PydanticCustomError, and
    classes with an attribute `code`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="PydanticCustomError"), args=[ast.Constant(value=str() as code), text, *_]):
                yield Raised(code, "ValidationError", text_of(text), "")
            case ast.Call(func=ast.Name(id=kind), args=[what, *_], keywords=keywords):
                arguments = {keyword.arg: keyword.value for keyword in keywords}
                if isinstance(code := arguments.get("code"), ast.Constant) and isinstance(code.value, str):
                    yield Raised(code.value, kind, text_of(what), text_of(arguments.get("remedy")))
            case ast.ClassDef(name=kind, body=[ast.Expr(value=ast.Constant(value=str() as about)), *body]):
                for statement in body:
                    match statement:
                        case ast.Assign(targets=[ast.Name(id="code")], value=ast.Constant(value=str() as code)):
                            yield Raised(code, kind, about.partition("\n")[0], "")


def all_raised() -> list[Raised]:
    """Return all errors with a code in the product's files, sorted."""
    files = tracked(*(f"{name}/*.py" for name in PRODUCT))
    return sorted({error for path in files for error in raised(ast.parse(Path(path).read_text()))})


EXPECTS = {"refused", "codes"}
"""Functions of `tests.refusals` that compare an error's code."""


def expected_codes(tree: ast.Module, codes: set[str]) -> dict[str, str]:
    """Return, for each of the `codes` that a test module expects, the name of the first test that expects it.

    A test expects codes if its body calls `refused` or `codes`, or compares an attribute `code`. The codes are the
    strings in its body, in its decorators, and in module constants and helpers that these name: codes of parametrized
    tables are found there.
    """
    texts: dict[str, set[str]] = {}  # of each top-level name
    checks: dict[str, bool] = {}
    names: dict[str, set[str]] = {}
    for node in tree.body:
        inside = list(ast.walk(node))
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                defined = [name]
            case ast.Assign(targets=targets):
                defined = [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                defined = [name]
            case _:
                continue
        for name in defined:
            constants = (each.value for each in inside if isinstance(each, ast.Constant))
            texts[name] = {value for value in constants if isinstance(value, str)}
            names[name] = {each.id for each in inside if isinstance(each, ast.Name)} - {name}
            compared = (each.left for each in inside if isinstance(each, ast.Compare))
            checks[name] = bool(names[name] & EXPECTS) or any(
                isinstance(part, ast.Attribute) and part.attr == "code" for left in compared for part in ast.walk(left)
            )
    shown: dict[str, str] = {}
    for test in (name for name in texts if name.startswith("test_")):
        reached, waiting = {test}, [test]
        while waiting:
            new = names[waiting.pop()] & texts.keys() - reached
            reached |= new
            waiting += new
        if any(checks[name] for name in reached):
            for code in sorted(set().union(*(texts[name] for name in reached)) & codes):
                shown.setdefault(code, test)
    return shown


def tests_of_codes(codes: set[str]) -> dict[str, str]:
    """Return one test for each code that a test expects, by code. A test is written `tests/file.py::name`."""
    shown: dict[str, str] = {}
    for path in sorted(tracked("tests/**/test_*.py", "tests/test_*.py")):
        for code, name in expected_codes(ast.parse(path.read_text()), codes).items():
            shown.setdefault(code, f"{path.relative_to(ROOT).as_posix()}::{name}")
    return shown


def page() -> str:
    """Return the text of the page docs/errors.md. Its table has one row for each code."""

    def cell(texts: list[str]) -> str:
        distinct = dict.fromkeys(re.sub(r"\s+", " ", text).replace("|", r"\|") for text in texts if text)
        return "<br>".join(re.sub(r"([<>*_`\[\]])", r"\\\1", text) for text in distinct)

    errors = all_raised()
    tests = tests_of_codes({error.code for error in errors})
    rows = []
    for code in dict.fromkeys(error.code for error in errors):
        same = [error for error in errors if error.code == code]
        kinds = ", ".join(f"`{kind}`" for kind in dict.fromkeys(error.kind for error in same))
        meanings, remedies = (cell([getattr(error, name) for error in same]) for name in ("meaning", "remedy"))
        test = f"`{tests[code]}`" if code in tests else ""
        rows.append(f"| `{code}` | {kinds} | {meanings} | {remedies} | {test} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
