"""A multi-turn verifiers environment: guess a number with hints; each hint comes with an image."""

import verifiers as vf
from datasets import Dataset
from sample_colors import image


class Guess(vf.MultiTurnEnv):
    def __init__(self, fail, rewrite, lenient, **kwargs):
        super().__init__(**kwargs)
        self.fail, self.rewrite, self.lenient = fail, rewrite, lenient

    async def env_response(self, messages, state, **kwargs):
        output = messages[-1]["content"]
        if self.fail:
            raise vf.ToolError("the game has crashed")
        if self.rewrite:
            messages[0]["content"] = "Something else."
        if output == state["answer"]:
            end = [{"role": "user", "content": "Right."}]
            state["final_env_response"] = end
            return end
        if self.lenient and not output.strip().isdigit():
            return [{"role": "user", "content": "That is not a number."}]
        hint = "more" if int(output) < int(state["answer"]) else "less"
        parts = [
            {"type": "text", "text": hint},
            {"type": "image_url", "image_url": {"url": image("red" if hint == "more" else "blue", 16)}},
        ]
        return [{"role": "user", "content": parts}]


def load_environment(max_turns=-1, fail=False, rewrite=False, lenient=False):
    data = [{"question": f"Game {number}: a number from 0 to 7?", "answer": str(number % 8)} for number in range(16)]

    def right(completion, answer):
        return float(any(message["role"] == "assistant" and message["content"] == answer for message in completion))

    rubric = vf.Rubric(funcs=[right])
    return Guess(fail, rewrite, lenient, dataset=Dataset.from_list(data), rubric=rubric, max_turns=max_turns)
