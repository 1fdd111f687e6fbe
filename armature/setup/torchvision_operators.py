"""Declare the operator schemas that a CUDA build of torchvision expects beside a CPU build of torch.

`armature.setup` installs this module next to torchvision, with a `.pth` file that loads it. It acts when torchvision is
first imported, so that Python starts without torch. It is needed until there is a CPU build of torchvision on PyPI.
"""

import importlib.abc
import sys
from typing import Any


class DeclareOnImport(importlib.abc.MetaPathFinder):
    """Import hook that declares the schemas just before torchvision is imported, and then removes itself."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            DECLARED.append(self.library)


DECLARED: list[Any] = []  # torch removes the schemas when their library is garbage-collected
sys.meta_path.insert(0, DeclareOnImport())
