"""Agent programs for tests, which use nothing but the standard library, and a table of their tasks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .dataset.tables import args_of, rows_of, write_images, write_jsonl

CLIENT = """
import base64, json, os, subprocess, sys, time, urllib.error, urllib.request
task = json.load(open(os.environ["ARMATURE_TASK"]))

def ask(messages, key=None, path="/chat/completions", raw=None, **fields):
    body = raw or json.dumps({"model": "policy", "messages": messages, **fields}).encode()
    headers = {"authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"]), "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, body, headers)
    with urllib.request.urlopen(request) as response:
        return response.read().decode()

def message(messages, **fields):
    return json.loads(ask(messages, **fields))["choices"][0]["message"]

def code(*arguments, **fields):
    try:
        ask(*arguments, **fields)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["code"]

def image_part(name):
    data = base64.b64encode(open(name, "rb").read()).decode()
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}

def user(*parts):
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}

def finish(answer, **fields):
    print(json.dumps({"answer": answer, **fields}), flush=True)

question = user(*map(image_part, task["images"]), task["prompt"])
"""
ONE_TURN = 'finish(message([question])["content"])'


def write_program(folder: Path, source: str) -> str:
    path = folder / "agent.py"
    path.write_text(CLIENT + source)
    return str(path)


def program_args(folder: Path, source: str = ONE_TURN, count: int = 40, **changes: Any) -> dict[str, Any]:
    rows = [{**row, "split": "train" if row["id"] < 24 else "test"} for row in rows_of(count)]
    write_images(folder, rows)
    write_jsonl(folder / "rows.jsonl", rows)
    table = args_of({"source": f"{folder}/rows.jsonl"}, kind="kind", split={"by": "column"})
    return {**table, "command": [sys.executable, write_program(folder, source)], **changes}
