"""LeRobot's half of the GPU benchmark of robot policies, in a Python that has LeRobot; see `benchmarks.lerobot_gpu`.

Usage: policy_lerobot.py [compiled] [small]. Its own code does all but read a checkpoint, whose weights are drawn from
their names, and wrap the model for several processes.
"""

import sys

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.molmoact2 import modeling_molmoact2 as port
from lerobot.policies.molmoact2.configuration_molmoact2 import MolmoAct2Config
from policy_case import (
    ACTIONS,
    CHUNK,
    COMPARED,
    IMAGES,
    PAD,
    Side,
    examples,
    fill,
    flow_samples,
    lerobot_update,
    norm_of,
    patches_of,
    serve,
)

MODES = {"full": "fft", "lora": "lora", "expert": "freeze"}


class LeRobot(Side):
    def __init__(self, small: bool, compiled: bool) -> None:
        super().__init__(small)
        self.compiled = compiled
        self._draw_weights()

    def _draw_weights(self) -> None:
        raw, device = self.raw, self.device

        def read_config(cls, *_, **__):
            made = {name: value for name, value in raw.items() if name != "model_type"}
            for part in ("vit_config", "adapter_config", "text_config"):  # as the released checkpoints have it
                made[part] = made[part] | {"attn_implementation": "sdpa"}
            return cls(**made)

        def build(cls, *_, config, dtype, **__):
            with torch.device(device):
                return cls._from_config(config, dtype=dtype)

        def weights(model, *_):
            for name, tensor in model.state_dict().items():
                fill(name, tensor)

        port.HFMolmoAct2Config.from_pretrained = classmethod(read_config)
        port.MolmoAct2ForConditionalGeneration.from_pretrained = classmethod(build)
        port._strict_load_safetensors_weights = weights

    def _policy(self, mode):
        side = self.raw["vit_config"]["image_default_input_size"][0]
        cameras = {f"observation.images.{n}": PolicyFeature(FeatureType.VISUAL, (3, side, side)) for n in (1, 2)}
        config = MolmoAct2Config(
            checkpoint_path=".",
            chunk_size=CHUNK,
            n_action_steps=CHUNK,
            action_mode="continuous" if mode == "expert" else "both",
            inference_action_mode="continuous",
            gradient_checkpointing=mode != "answer",
            compile_model=self.compiled,
            train_mode_vlm=MODES.get(mode, "fft"),
            device=self.device.type,
            input_features=cameras,
            output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTIONS,))},
        )
        return port.MolmoAct2Policy(config).to(self.device)

    def open_answer(self, rows):
        policy = self._policy("answer").eval()
        policy.config.enable_inference_cuda_graph = True
        inputs = self._batch(rows, answers=False, trained=False)

        def work():
            arguments = {name: value.to(self.device) for name, value in inputs.items()}
            policy.predict_action_chunk(arguments, num_steps=10).cpu()

        self.work = work
        return {"tokens": int(inputs["attention_mask"].sum())}

    def open_training(self, mode, count):
        policy = self._policy(mode)
        inputs = self._batch(count, answers=mode != "expert", trained=True)
        inputs = {name: value.to(self.device) for name, value in inputs.items()}
        few = self._batch(COMPARED, answers=mode != "expert", trained=True)
        result = self._first(
            policy.eval(), {name: value.to(self.device) for name, value in few.items()}, mode != "expert"
        )

        self.work = lerobot_update(policy, lambda: policy(inputs)[0])
        trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        return result | {"tokens": int(inputs["attention_mask"].sum()), "trained": trained}

    def _first(self, policy, inputs, tokens):
        """Return the loss of these examples and the norm of the action expert's gradient. Flow times and noise are
        fixed, and there is no dropout."""
        times, noise = (part.to(self.device) for part in flow_samples(self.raw))
        with policy._autocast_context():
            loss, states = policy._compute_flow_matching_loss_joint_per_layer(
                batch=inputs, model_inputs=policy._model_inputs(inputs), timesteps=times, noise=noise
            )
            if tokens:
                outputs = type("Outputs", (), {"last_hidden_state": states})
                loss = loss + sum(policy._discrete_loss_from_backbone_outputs(inputs, outputs))
        loss.backward()
        norm = norm_of(policy._backbone().action_expert.parameters())
        policy.zero_grad(set_to_none=True)
        return {"loss": loss.item(), "norm": norm}

    def _batch(self, count, *, answers, trained):
        arguments = list(examples(self.raw, count, answers=answers))
        longest = max(len(one["ids"]) for one in arguments)
        width = 1 + -(-(longest - 1) // 8) * 8 if trained else longest
        ids, mask = np.full((count, width), PAD, np.int64), np.zeros((count, width), np.int64)
        kinds, labels = np.zeros((count, width), np.int64), np.full((count, width), -100, np.int64)
        for row, one in enumerate(arguments):
            place = (row, slice(width - len(one["ids"]), width))
            ids[place], mask[place], kinds[place] = one["ids"], 1, one["image_tokens"]
            if answers:
                labels[place] = one["labels"]
        pooled = -(-patches_of(self.raw) // 2)
        made = {
            "input_ids": ids,
            "attention_mask": mask,
            "token_type_ids": kinds,
            "pixel_values": np.concatenate([one["pixels"] for one in arguments]).astype(np.float32) / 127.5 - 1.0,
            "image_token_pooling": np.concatenate([one["windows"] for one in arguments for _ in range(IMAGES)]),
            "image_grids": np.tile(np.array([[pooled, pooled, 0, 0]]), (IMAGES * count, 1)),
            "image_num_crops": np.ones(IMAGES * count, np.int64),
            "action_dim_is_pad": np.tile(np.arange(self.raw["max_action_dim"]) >= ACTIONS, (count, 1)),
        }
        if trained:
            made["action"] = np.stack([one["actions"] for one in arguments])
            made["action_horizon_is_pad"] = np.zeros((count, CHUNK), bool)
        if answers:
            made["labels"] = labels
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in made.items()}


if __name__ == "__main__":
    if "compile_model" not in MolmoAct2Config.__dataclass_fields__:
        sys.exit(
            "LeRobot's MolmoAct2 has no compile_model, so it is 0.6.1 or older: install main of August 2026 or newer"
        )
    serve(LeRobot("small" in sys.argv, "compiled" in sys.argv))
