"""Tools that come with the project: zoom, crop, rotate and calculator."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from PIL import Image

from armature.components.environments.tools.tool import ToolError

ZOOMED = 448
"""Length in pixels of the longer side of an enlarged region."""


def zoom(image: Image.Image, box: list[float]) -> Image.Image:
    """Look at a region of an image, enlarged.

    Args:
        image: Number of the image, from 0. The default is the last image.
        box: Left, top, right and bottom of the region in pixels of the image.
    """
    region = crop(image, box)
    scale = max(1.0, ZOOMED / max(region.size))
    size = max(1, round(region.width * scale)), max(1, round(region.height * scale))
    return region.resize(size, Image.Resampling.BICUBIC)


def crop(image: Image.Image, box: list[float]) -> Image.Image:
    """Cut a region out of an image.

    Args:
        image: Number of the image, from 0. The default is the last image.
        box: Left, top, right and bottom of the region in pixels of the image.
    """
    if len(box) != 4 or not all(math.isfinite(side) for side in box):
        raise ToolError(f"a box has four numbers (left, top, right, bottom), not {box!s:.80}")
    left, top = max(0, math.floor(box[0])), max(0, math.floor(box[1]))
    right, bottom = min(image.width, math.ceil(box[2])), min(image.height, math.ceil(box[3]))
    if left >= right or top >= bottom:
        raise ToolError(f"the box {box} has no pixel of the image, which has {image.width} x {image.height}")
    return image.crop((left, top, right, bottom))


def rotate(image: Image.Image, degrees: float) -> Image.Image:
    """Turn an image counter-clockwise. Corners that it does not fill are white.

    Args:
        image: Number of the image, from 0. The default is the last image.
        degrees: Angle in degrees.
    """
    if not math.isfinite(degrees):
        raise ToolError(f"{degrees} is not an angle")
    return image.rotate(degrees, Image.Resampling.BICUBIC, expand=True, fillcolor="white")


_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: math.pow(base, exponent),  # integers could become too long
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log10", "sin", "cos", "tan", "floor", "ceil")},
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % **, parentheses, pi, e, and functions such as sqrt(2) or max(1, 2).
    """
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (ArithmeticError, ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ToolError(f"{expression!r:.80} has no value: {error}") from error
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else str(value)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            if abs(number) > 1e300:
                raise ValueError("a number is too large")
            return number
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_value, arguments))
    raise ValueError(f"{ast.unparse(node):.40} is not arithmetic")
