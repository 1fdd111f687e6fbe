"""Images for the v1 sample, which cannot import the legacy one."""

import base64
import io

from PIL import Image

COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (40, 70, 220)}


def image(color, size):
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), COLORS[color]).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
