"""Run by vLLM's own interpreter: decodes images as the server does.

Reads the path of an image file from each line of the input, writes its pixels to <path>.npy, and answers with a line:
the image's shape, or why the server refuses it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from vllm.multimodal.media.image import ImageMediaIO

decoder = ImageMediaIO()
print("ready", flush=True)
for line in sys.stdin:
    path = line.strip()
    try:
        pixels = np.asarray(decoder.load_bytes(Path(path).read_bytes()).media)
        np.save(f"{path}.npy", pixels)
        print(pixels.shape, flush=True)
    except Exception as error:
        print(f"refused: {error!r}", flush=True)
