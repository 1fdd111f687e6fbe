"""Policies of the released sizes on a GPU, ours and LeRobot's: updates and answers, on the same weights and examples.

Usage: python -m benchmarks.lerobot_gpu [smolvla] [plain] [compiled] [CASE...]: MolmoAct2, with cases as "full 8", or
SmolVLA, with cases as "full 8 bfloat16" and LeRobot 0.6.1; on a CPU small ones. LeRobot runs in the Python that
ARMATURE_LEROBOT_PYTHON names, as it is (plain) and with `compile_model`. Of each case both sides are set up at once,
and then measured in turn, `ROUNDS` times. The rows go to $OUT/lerobot.json as well, each as soon as it is measured.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks import policy_case, smolvla_case

HERE = Path(__file__).parent
SMALL = not torch.cuda.is_available()
ROUNDS, CALLS = 3, {"answer 1": 10, "answer 8": 5, "expert 8": 4, "expert 32": 3, "full 32": 2, "lora 32": 2}
WAYS = ("plain", "compiled")
"""Variants in which LeRobot is measured."""


class Side:
    """Process of one of the two compared sides. It answers one request at a time."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        words = [*command, *(["small"] if SMALL else [])]
        self.name, environment = name, os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE.parent, env=environment
        )

    def ask(self, **request: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `answer` says so
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"failed": "the process ended"}

    def stop(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def compare(case: str, ours: Side, theirs: Side) -> dict[str, Any]:
    """Measure a case on both sides. Return median seconds, the ratios of our time to theirs with their spread, and the
    facts which show that both sides do equal work.

    A round's ratio is the ratio of the two medians in that round.

    The ratio of a round is that of its medians.
    """
    row: dict[str, Any] = {"case": case, "against": theirs.name}
    for side in (ours, theirs):
        side.ask(do="open", case=case)
    opened = [side.answer() for side in (ours, theirs)]
    taken: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    if not any("failed" in each for each in opened):
        for _ in range(ROUNDS):
            for side, rounds in zip((ours, theirs), taken, strict=True):
                side.ask(do="measure", count=CALLS.get(case, 3))
                rounds.append(side.answer())
    for side, name, first, rounds in zip((ours, theirs), ("ours", "theirs"), opened, taken, strict=True):
        side.ask(do="close")
        side.answer()
        if failed := [each["failed"] for each in (first, *rounds) if "failed" in each]:
            row[f"{name}_failed"] = failed[0]
        elif rounds:
            row |= {f"{name}_{key}": value for key, value in first.items()}
            row[f"{name}_seconds"] = statistics.median(second for each in rounds for second in each["seconds"])
            row[f"{name}_peak_gib"] = max(each["peak_gib"] for each in rounds)
    if "ours_seconds" in row and "theirs_seconds" in row:
        ratios = [one["median"] / other["median"] for one, other in zip(*taken, strict=True)]
        row |= {"ratio": statistics.median(ratios), "spread": [min(ratios), max(ratios)]}
    return row


def main(words: Sequence[str]) -> None:
    words, policy = list(words), "policy"
    if "smolvla" in words:
        policy = words.pop(words.index("smolvla"))
    every = (smolvla_case if policy == "smolvla" else policy_case).CASES
    if unknown := set(words) - {*every, *WAYS}:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}\n{__doc__}")
    python = os.environ.get("ARMATURE_LEROBOT_PYTHON", str(HERE.parent / ".venv-lerobot/bin/python"))
    result: dict[str, Any] = {"device": "CPU" if SMALL else torch.cuda.get_device_name(), "torch": torch.__version__}
    result["rows"] = []
    ours = Side("ours", [sys.executable, "-m", f"benchmarks.{policy}_ours"])
    cases = [case for case in every if case in words] or every
    for way in [way for way in WAYS if way in words] or WAYS:
        theirs = Side(way, [python, str(HERE / f"{policy}_lerobot.py"), *([way] if way == "compiled" else [])])
        for case in cases:
            result["rows"].append(compare(case, ours, theirs))
            print(json.dumps(result["rows"][-1]), flush=True)
            if "OUT" in os.environ:
                Path(os.environ["OUT"], "lerobot.json").write_text(json.dumps(result, indent=1))
        theirs.stop()
    ours.stop()
    if not words and not SMALL:
        from benchmarks.table import write

        write("lerobot-gpu" if policy == "policy" else f"lerobot-{policy}-gpu", result)


if __name__ == "__main__":
    main(sys.argv[1:])
