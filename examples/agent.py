"""An agent on the plain `openai` package: it looks at an image with two tools, and answers in one word.

It imports nothing of Armature. A recipe trains the model behind it with `[environment] name = "program"`.
"""

import base64
import io
import json
import os
from pathlib import Path
from typing import Any

from openai import OpenAI
from PIL import Image

TURNS = 3


def image_part(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("zoom", "Look at a region of an image, enlarged.", box={"type": "array", "items": {"type": "number"}}),
    tool("size", "Return the size of the image in pixels."),
]


def call_tool(image: Image.Image, name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    if name == "zoom":
        try:
            return [image_part(image.crop(arguments["box"]).resize((448, 448)))]
        except (KeyError, TypeError, ValueError) as error:
            return [{"type": "text", "text": f"Error: {error}"}]
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
            content = call_tool(image, call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    print(json.dumps({"answer": reply.content or ""}))


if __name__ == "__main__":
    main()
