"""The registry of tools: their names and the functions that implement them.

A function in a file beside a recipe needs no entry: the recipe names it "module:function".
"""

from __future__ import annotations

from armature.components.machine.registry import Registry

_STANDARD = "armature.components.environments.tools.standard"

TOOLS = Registry(
    "tool",
    "armature.tools",
    {
        "calculator": f"{_STANDARD}:calculator",
        "crop": f"{_STANDARD}:crop",
        "python": "armature.components.environments.tools.python:python",
        "rotate": f"{_STANDARD}:rotate",
        "zoom": f"{_STANDARD}:zoom",
    },
    modules=True,
)
