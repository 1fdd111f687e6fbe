"""Complete settings for tests, which a test changes where needed."""

from __future__ import annotations

from typing import Any

from armature.components.robots.imitation.settings import VLATrainerSettings

TRAINING: dict[str, Any] = {
    "mode": "full",
    "freeze_embedding": True,
    "gradient_checkpointing": False,
    "max_steps": 4,
    "batch_size": 4,
    "micro_batch_size": 2,
    "learning_rates": {"vlm": 1e-3, "vit": 1e-3, "connector": 1e-3, "action_expert": 1e-3},
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "warmup_steps": 0,
    "final_lr_fraction": 0.1,
    "heldout": {"fraction": 0.25, "frames": 4, "every": 2},
    "save_every": 2,
    "keep_checkpoints": 2,
    "seed": 0,
}
LORA = {"rank": 4, "alpha": 8.0}
AUGMENTATION = {
    "crop_side": 0.95,
    "rotation_degrees": 5.0,
    "brightness": 0.2,
    "contrast": 0.2,
    "saturation": 0.2,
    "hue": 0.05,
    "blur_probability": 0.2,
}


def training_settings(**changes: Any) -> VLATrainerSettings:
    expert = {"learning_rates": {"action_expert": 1e-3}} if changes.get("mode") == "expert" else {}
    return VLATrainerSettings.model_validate(TRAINING | expert | changes)
