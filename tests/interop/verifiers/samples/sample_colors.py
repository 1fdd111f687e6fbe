"""A single-turn verifiers environment (load_environment): name the color of an image."""

import base64
import io

import verifiers as vf
from datasets import Dataset
from PIL import Image

COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (40, 70, 220)}


def image(color, size):
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), COLORS[color]).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def rows(count, size):
    for number in range(count):
        color = list(COLORS)[number % 3]
        parts = [
            {"type": "image_url", "image_url": {"url": image(color, size)}},
            {"type": "text", "text": f"What colour is image {number}?"},
        ]
        system = [{"type": "text", "text": "One word."}]
        yield {"prompt": [{"role": "system", "content": system}, {"role": "user", "content": parts}], "answer": color}


def load_environment(count=12, size=16, heldout=0, broken=False):
    def said(completion):
        return completion[-1]["content"].strip()

    def correct(completion, answer, prompt):
        # a rubric that reads the prompt twice: the contents must still be there
        assert len(list(prompt[-1]["content"])) == 2 and len(list(prompt[-1]["content"])) == 2
        return float(said(completion) == answer)

    def length(completion):
        return float(len(said(completion)))

    if broken:
        raise RuntimeError("no such data")
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(list(rows(count, size))),
        eval_dataset=Dataset.from_list(list(rows(heldout, size + 1))) if heldout else None,
        rubric=vf.Rubric(funcs=[correct, length], weights=[1.0, 0.1]),
    )
