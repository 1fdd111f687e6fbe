"""Decode images as a vLLM server does; runs in vLLM's own Python environment.

Each input line is the path of an image file. Its pixels are written to <path>.npy, and the output line is the pixels'
shape, or the reason why vLLM refuses the image.
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
