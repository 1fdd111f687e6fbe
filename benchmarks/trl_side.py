"""TRL's half of the trainer benchmark; runs in `.venv-trl` and knows nothing of this project.

Usage: trl_side.py CHECKPOINT ROWS SIDE TOKENS STEPS. Prints one JSON line: seconds per optimizer step and lengths.

With num_iterations = STEPS + 1 every generated batch is trained on that many times, so all steps but the first
are optimizer steps without generation.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Timed(GRPOTrainer):
    """Notes the shape of every step."""

    shapes: list

    def _compute_loss(self, model, inputs):
        self.shapes.append((inputs["prompt_ids"].shape, inputs["completion_ids"].shape))
        return super()._compute_loss(model, inputs)


def main() -> None:
    checkpoint, rows, side, tokens, steps = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    torch.set_num_threads(1)
    image = Image.new("RGB", (side, side), (200, 40, 40))
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
        trainer.shapes = []
        ends = []

        class Ends(TrainerCallback):
            def on_step_end(self, *arguments, **more):
                ends.append(time.perf_counter())

        trainer.add_callback(Ends())
        began = time.perf_counter()
        trainer.train()
    whole = [later - earlier for earlier, later in zip([began, *ends], ends, strict=False)]
    prompt_shape, completion_shape = trainer.shapes[-1]
    print(json.dumps({"seconds": whole[1:], "prompt": list(prompt_shape), "completion": list(completion_shape)}))


main()
