"""The process of an agent program that is a function: `python -m ...program.function MODULE:FUNCTION`.

The function gets the task as a dict, and returns the answer, or a dict with `answer` and `reward`. It may be async.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from armature.components.machine.project import load_object


def main(name: str) -> None:
    """Call the function called MODULE:FUNCTION with the task, and print its result as a line of JSON."""
    result = load_object(name, "program")(json.loads(Path(os.environ["ARMATURE_TASK"]).read_bytes()))
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    print(f"\n{json.dumps(result if isinstance(result, Mapping) else {'answer': result})}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
