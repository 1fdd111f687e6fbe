"""A verifiers environment whose policy calls a tool."""

import verifiers as vf
from datasets import Dataset


def add(one: int, other: int) -> str:
    """Add two numbers.

    Args:
        one: A number.
        other: A number.
    """
    return str(one + other)


def load_environment():
    data = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(16)]

    def right(completion, answer):
        return float(completion[-1]["content"] == answer)

    return vf.ToolEnv(dataset=Dataset.from_list(data), rubric=vf.Rubric(funcs=[right]), tools=[add], max_turns=4)
