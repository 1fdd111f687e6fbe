"""An agent on the plain `openai` package: it looks at an image with two tools, and answers in one word.

It imports nothing of Armature. A recipe trains the model behind it with `[environment] name = "program"`.
"""

import base64
import io
import json
import os
from pathlib import Path

from openai import OpenAI
from PIL import Image

TURNS = 3
SIDES = {"left": 0, "right": 1}


def image_part(image: Image.Image) -> dict:
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def tool(name: str, description: str, **properties: dict) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("half", "Look at a half of the image.", side={"type": "string", "enum": list(SIDES)}),
    tool("size", "Return the size of the image."),
]


def called(image: Image.Image, name: str, arguments: dict) -> list[dict]:
    if name == "half":
        left = SIDES.get(str(arguments.get("side")), 0) * image.width // 2
        return [image_part(image.crop((left, 0, left + image.width // 2, image.height)))]
    return [{"type": "text", "text": f"{image.width} x {image.height}"}]


def main() -> None:
    task = json.loads(Path(os.environ["ARMATURE_TASK"]).read_text())
    client, image = OpenAI(), Image.open(task["images"][0])  # OPENAI_BASE_URL and OPENAI_API_KEY are set
    messages = [{"role": "user", "content": [image_part(image), {"type": "text", "text": task["prompt"]}]}]
    for _ in range(TURNS):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            content = called(image, call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    print(json.dumps({"answer": reply.content or ""}))


if __name__ == "__main__":
    main()
