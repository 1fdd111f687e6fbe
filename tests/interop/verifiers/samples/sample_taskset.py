"""A v1 taskset whose bundled harness is a chat loop in this process, so that no runtime has to be prepared."""

import verifiers.v1 as vf
from openai import AsyncOpenAI
from sample_colors_v1 import COLORS, image
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ColorTaskset", "LoopHarness"]


class ColorData(vf.TaskData):
    answer: str


class ColorTask(vf.Task[ColorData]):
    @vf.reward(weight=2.0)
    async def correct(self, task, trace) -> float:
        return float(trace.last_reply.strip() == task.answer)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class ColorTaskset(vf.Taskset[ColorTask]):
    def load(self):
        for number in range(12):
            color = list(COLORS)[number % 3]
            prompt = [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": image(color, 16)}},
                        {"type": "text", "text": f"Image {number}?"},
                    ],
                }
            ]
            data = ColorData(prompt=prompt, answer=color, system_prompt="One word.")
            yield ColorTask(data, self.config.task)


class LoopHarnessConfig(vf.HarnessConfig):
    asks_again: int = 1


class LoopHarness(vf.Harness[LoopHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, *(message_to_wire(message) for message in prompt)]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for again in range(self.config.asks_again + 1):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages.append({"role": "user", "content": f"Sure? {again}"})
        return ProgramResult(exit_code=0, stdout="", stderr="")
