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
for an unknown key. The table is made from the code by `python -m tests.error_table`.

| code | error | meaning | what to do |
|---|---|---|---|
"""


@dataclass(frozen=True, order=True)
class Raised:
    """One way to raise an error with `code`: its class, its sentence and its remedy, with … for what varies."""

    code: str
    kind: str
    meaning: str
    remedy: str


def text_of(node: ast.expr | None) -> str:
    """Return the text of an expression; a part that varies is its name in braces, or … if it has none."""
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
    """Every error with a code of a module: calls with `code=`, pydantic's custom errors, and classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="PydanticCustomError"), args=[ast.Constant(value=str() as code), text, *_]):
                yield Raised(code, "ValidationError", text_of(text), "")
            case ast.Call(func=ast.Name(id=kind), args=[what, *_], keywords=keywords):
                given = {keyword.arg: keyword.value for keyword in keywords}
                if isinstance(code := given.get("code"), ast.Constant) and isinstance(code.value, str):
                    yield Raised(code.value, kind, text_of(what), text_of(given.get("remedy")))
            case ast.ClassDef(name=kind, body=[ast.Expr(value=ast.Constant(value=str() as about)), *body]):
                for statement in body:
                    match statement:
                        case ast.Assign(targets=[ast.Name(id="code")], value=ast.Constant(value=str() as code)):
                            yield Raised(code, kind, about.partition("\n")[0], "")


def all_raised() -> list[Raised]:
    """Every error with a code of the product, sorted."""
    files = tracked(*(f"{name}/*.py" for name in PRODUCT))
    return sorted({error for path in files for error in raised(ast.parse(Path(path).read_text()))})


def page() -> str:
    """Return the page; each code is one row."""

    def cell(texts: list[str]) -> str:
        distinct = dict.fromkeys(re.sub(r"\s+", " ", text).replace("|", r"\|") for text in texts if text)
        return "<br>".join(re.sub(r"([<>*_`\[\]])", r"\\\1", text) for text in distinct)

    errors = all_raised()
    rows = []
    for code in dict.fromkeys(error.code for error in errors):
        same = [error for error in errors if error.code == code]
        kinds = ", ".join(f"`{kind}`" for kind in dict.fromkeys(error.kind for error in same))
        meanings, remedies = (cell([getattr(error, name) for error in same]) for name in ("meaning", "remedy"))
        rows.append(f"| `{code}` | {kinds} | {meanings} | {remedies} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
