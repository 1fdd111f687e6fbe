"""LeRobot's half of the GPU benchmark of SmolVLA, in a Python that has LeRobot 0.6.1; see `benchmarks.lerobot_gpu`.

Usage: smolvla_lerobot.py [compiled] [small]. It updates as lerobot-train does: with TF32, in bfloat16 under autocast.
"""

import os
import sys
import tempfile

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from policy_case import COMPARED, Side, fill, lerobot_update, norm_of, serve
from smolvla_case import (
    ACTIONS,
    CAMERAS,
    STATES,
    answer_noise,
    arrays,
    flow_samples,
    make_tokenizer,
    policy_fields,
    vlm_config,
)
from transformers import SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

COMPILE_MODE = os.environ.get("ARMATURE_LEROBOT_COMPILE_MODE", "max-autotune")
"""LeRobot's default compiles for minutes a case."""


class LeRobot(Side):
    def __init__(self, small: bool, compiled: bool) -> None:
        super().__init__(small)
        self.compiled = compiled
        self.vlm = tempfile.mkdtemp()
        SmolVLMConfig(**vlm_config(small)).save_pretrained(self.vlm)
        parts = SmolVLMImageProcessor(), make_tokenizer(), SmolVLMVideoProcessor()
        SmolVLMProcessor(*parts, chat_template="").save_pretrained(self.vlm)

    def _policy(self, mode):
        side = 64 if self.small else 512
        inputs = {name: PolicyFeature(FeatureType.VISUAL, (3, side, side)) for name in CAMERAS}
        config = SmolVLAConfig(
            vlm_model_name=self.vlm,
            freeze_vision_encoder=mode != "full",
            train_expert_only=mode != "full",
            compile_model=self.compiled,
            compile_mode=COMPILE_MODE,
            device=self.device.type,
            input_features={**inputs, "observation.state": PolicyFeature(FeatureType.STATE, (STATES,))},
            output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTIONS,))},
            **policy_fields(self.small),
        )
        with torch.device(self.device):
            policy = SmolVLAPolicy(config)
        for name, tensor in policy.state_dict().items():
            fill(name, tensor)
        policy.model.vlm_with_expert.vlm.to(getattr(torch, self.dtype))  # bf16 as `load_vlm_weights` loads it
        return policy

    def _autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16")

    def _batch(self, count):
        made = {name: torch.from_numpy(value).to(self.device) for name, value in arrays(self.small, count).items()}
        images = dict(zip(CAMERAS, made["images"].unbind(1), strict=True))
        text = {"observation.language.tokens": made["ids"], "observation.language.attention_mask": made["seen"]}
        return {**images, **text, "observation.state": made["state"], "action": made["actions"]}

    def open_answer(self, rows):
        policy = self._policy("answer").eval()
        torch.backends.cuda.matmul.allow_tf32 = True
        inputs = {name: value.cpu() for name, value in self._batch(rows).items() if name != "action"}
        noise = answer_noise(rows)

        def work():
            arguments = {name: value.to(self.device) for name, value in inputs.items()}
            with self._autocast():
                return policy.predict_action_chunk(arguments, noise=noise.to(self.device)).cpu()

        self.work = work
        return {"norm": work()[0].norm().item()}

    def open_training(self, mode, count):
        policy = self._policy(mode)
        result = self._first(policy)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
        inputs = self._batch(count)

        def loss():
            with self._autocast():
                return policy.forward(inputs)[0]

        self.work = lerobot_update(policy, loss)
        return result | {"trained": sum(p.numel() for p in policy.parameters() if p.requires_grad)}

    def _first(self, policy):
        """Return the loss of the first examples, without TF32 and without compiling, and its gradient's norm."""
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        compiled, policy.model.forward = policy.model.forward, type(policy.model).forward.__get__(policy.model)
        times, noise = (part.to(self.device) for part in flow_samples(COMPARED))
        with self._autocast():
            loss, _ = policy.forward(self._batch(COMPARED), noise=noise, time=times)
        loss.backward()
        norm = norm_of(policy.parameters())
        policy.zero_grad(set_to_none=True)
        policy.model.forward, torch.backends.cudnn.allow_tf32 = compiled, True
        return {"loss": loss.item(), "norm": norm}


if __name__ == "__main__":
    serve(LeRobot("small" in sys.argv, "compiled" in sys.argv))
