"""TRL's half of the trainer benchmark; runs in `.venv-trl` and knows nothing of this project.

Usage: trl_side.py CHECKPOINT IMAGE ROWS TOKENS STEPS FILE. Prints one JSON line: CPU seconds per optimizer step
and the norm of the first gradient. Writes what it trains on to FILE: prompts, completions, advantages.

With num_iterations = STEPS + 1 every generated batch is trained on that many times, so all steps but the first
are optimizer steps without generation.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Timed(GRPOTrainer):
    """Trainer of TRL that records the batch of every step and the norm of its gradient."""

    batches: list
    norms: list

    def _compute_loss(self, model, inputs):
        names = ("prompt_ids", "prompt_mask", "completion_ids", "advantages")
        self.batches.append({name: inputs[name].numpy() for name in names})
        return super()._compute_loss(model, inputs)

    def _clip_grad_norm(self, model):
        norm = super()._clip_grad_norm(model)
        self.norms.append(float(norm))
        return norm


def main() -> None:
    checkpoint, (rows, tokens, steps) = Path(sys.argv[1]), map(int, sys.argv[3:6])
    torch.set_num_threads(1)
    image = Image.open(sys.argv[2])
    prompt = [{"role": "user", "content": "What colour is this?"}]
    data = Dataset.from_list([{"prompt": prompt, "image": image} for _ in range(4)])
    with tempfile.TemporaryDirectory() as scratch:
        settings = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            gradient_checkpointing=False,
            per_device_train_batch_size=rows,
            num_generations=rows,
            num_iterations=steps + 1,
            steps_per_generation=1,
            max_steps=steps + 1,
            max_completion_length=tokens,
            generation_kwargs={"min_new_tokens": tokens},
            beta=0.0,
            learning_rate=1e-5,
            remove_unused_columns=False,
        )
        model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
        rewards = iter(range(10**9))
        trainer = Timed(
            model=model,
            args=settings,
            reward_funcs=lambda completions, **_: [float(next(rewards) % 2) for _ in completions],
            train_dataset=data,
            processing_class=AutoProcessor.from_pretrained(checkpoint),
        )
        trainer.batches, trainer.norms = [], []
        ends = []

        class Ends(TrainerCallback):
            def on_step_end(self, *arguments, **more):
                ends.append(time.process_time())

        trainer.add_callback(Ends())
        began = time.process_time()
        trainer.train()
    whole = [later - earlier for earlier, later in zip([began, *ends], ends, strict=False)]
    np.savez(sys.argv[6], **trainer.batches[0])
    print(json.dumps({"seconds": whole[1:], "norm": trainer.norms[0]}))


main()
