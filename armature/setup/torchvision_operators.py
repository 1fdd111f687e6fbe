"""Declares the operator schemas that a CUDA build of torchvision expects, when torch is a CPU build.

Installed next to torchvision by `armature.setup` and loaded by a `.pth` file; acts when torchvision is first
imported, so that Python starts without torch. Needed until the registry has a CPU build of torchvision.
"""

import importlib.abc
import sys
from typing import Any


class DeclareOnImport(importlib.abc.MetaPathFinder):
    """Declares the schemas just before torchvision is found, then steps aside."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            DECLARED.append(self.library)


DECLARED: list[Any] = []  # a library that is collected takes its schemas with it
sys.meta_path.insert(0, DeclareOnImport())
