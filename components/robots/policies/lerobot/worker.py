"""Worker process that computes a LeRobot policy. It runs in LeRobot's environment, which has none of our packages.

So this module imports only NumPy, LeRobot and the worker channel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armature.components.machine.workers.channel import serve

Images = dict[str, NDArray[np.uint8]]


class LeRobotWorker:
    """A policy with its pre- and postprocessor, as LeRobot saved them.

    Args:
        folder: the checkpoint.
        n_action_steps: number of actions to execute of a chunk.
        threads: number of CPU threads of torch.
    """

    def __init__(self, folder: str, n_action_steps: int, threads: int) -> None:
        import torch
        from lerobot.configs.policies import PreTrainedConfig
        from lerobot.policies.factory import get_policy_class, make_pre_post_processors

        torch.set_num_threads(threads)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        config = PreTrainedConfig.from_pretrained(folder)
        config.device, config.n_action_steps = device, n_action_steps
        # Weights that the checkpoint replaces are not downloaded first.
        for name, value in (("pretrained_backbone_weights", None), ("load_vlm_weights", False)):
            if hasattr(config, name):
                setattr(config, name, value)
        # A checkpoint without some weights must not play with random ones, which LeRobot's default allows.
        self._policy = get_policy_class(config.type).from_pretrained(Path(folder), config=config, strict=True).eval()
        self._before, self._after = make_pre_post_processors(
            config, pretrained_path=folder, preprocessor_overrides={"device_processor": {"device": device}}
        )
        self._steps = n_action_steps

    def predict(
        self,
        images: list[dict[str, NDArray[np.uint8]]],
        states: NDArray[np.float32],
        tasks: list[str],
        seeds: list[int],
    ) -> NDArray[np.float32]:
        """Return the actions that LeRobot's `select_action` returns after a reset, (N, n_action_steps, dimensions).

        Each row is computed alone, from torch's random numbers with the row's seed.
        """
        return np.stack([self._row(*row) for row in zip(images, states, tasks, seeds, strict=True)])

    def _row(self, images: Images, state: NDArray[np.float32], task: str, seed: int) -> NDArray[np.float32]:
        import torch

        batch: dict[str, Any] = {
            name: torch.from_numpy(image.astype(np.float32) / 255).permute(2, 0, 1).contiguous()
            for name, image in images.items()
        }
        torch.manual_seed(seed)
        self._policy.reset()
        with torch.inference_mode():
            inputs = self._before({**batch, "observation.state": torch.from_numpy(state.copy()), "task": task})
            actions = [self._after(self._policy.select_action(dict(inputs))) for _ in range(self._steps)]
        return torch.cat(actions).float().cpu().numpy()

    def close(self) -> None:
        """Do nothing: the memory is freed with the process."""


if __name__ == "__main__":
    serve(LeRobotWorker)
