"""TRL's side of supervised and preference training on conversations with images; runs in `.venv-trl` alone.

Usage: sft_trl.py METHOD CHECKPOINT ROWS RESULT OPTIONS. METHOD is sft or dpo, ROWS a dataset that `save_to_disk` wrote,
whose rows are trained on once and in their order, and OPTIONS a JSON object: `rows` of an update, `micro` of a forward
pass, `learning_rate`, `epsilon`, `beta`, and optionally `liger`, `recompute`, `bf16` and `attention`. RESULT is a JSON
object: loss, gradient norm and seconds of each update, for pairs the reward margins, and the peak of GPU memory.
"""

import json
import sys
import tempfile
import time
import warnings
from pathlib import Path

import step_trl  # noqa: F401 (gives transformers the names that Liger imports)
import torch
from datasets import load_from_disk
from torch.utils.data import SequentialSampler
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

CUDA = torch.cuda.is_available()


class Noting:
    """Mixin for a trainer of TRL that keeps the rows' order and records losses, norms and margins."""

    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, *arguments, **more):
        loss = super().compute_loss(*arguments, **more)
        self.losses.append(float(loss))
        if "rewards/margins" in self._metrics["train"]:
            self.margins.append(self._metrics["train"]["rewards/margins"][-1])
        return loss

    def _clip_grad_norm(self, model):
        norm = super()._clip_grad_norm(model)
        self.norms.append(float(norm))
        return norm


class NotingSFT(Noting, SFTTrainer):
    """Supervised training."""


class NotingDPO(Noting, DPOTrainer):
    """Preference training."""


class Clock(TrainerCallback):
    def __init__(self):
        self.ends = [time.perf_counter()]

    def on_step_end(self, *arguments, **more):
        if CUDA:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        if len(self.ends) == 2 and CUDA:
            torch.cuda.reset_peak_memory_stats()


def main():
    warnings.filterwarnings("ignore")
    method, checkpoint, rows, out, options = *sys.argv[1:5], json.loads(sys.argv[5])
    bf16, recompute = options.get("bf16", False), options.get("recompute", False)
    shared = {
        "use_cpu": not CUDA,
        "bf16": bf16,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "per_device_train_batch_size": options["micro"],
        "gradient_accumulation_steps": options["rows"] // options["micro"],
        "num_train_epochs": 1,
        "learning_rate": options["learning_rate"],
        "adam_epsilon": options["epsilon"],
        "lr_scheduler_type": "constant",
        "max_length": None,
        "remove_unused_columns": False,
        "gradient_checkpointing": recompute,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if recompute else None,
        "use_liger_kernel": options.get("liger", False),
        "disable_tqdm": True,
        "dataloader_num_workers": 4 if CUDA else 0,
    }
    model = AutoModelForImageTextToText.from_pretrained(
        checkpoint,
        dtype=torch.bfloat16 if bf16 else torch.float32,
        attn_implementation=options.get("attention", "sdpa"),
    )
    model.to("cuda" if CUDA else "cpu")
    arguments = {
        "model": model,
        "train_dataset": load_from_disk(rows),
        "processing_class": AutoProcessor.from_pretrained(checkpoint),
    }
    with tempfile.TemporaryDirectory() as scratch:
        if method == "sft":
            trainer = NotingSFT(args=SFTConfig(output_dir=scratch, assistant_only_loss=True, **shared), **arguments)
        else:
            # TRL refuses to compute reference log-probs once if there are images: it keeps a copy of the model.
            trainer = NotingDPO(args=DPOConfig(output_dir=scratch, beta=options["beta"], **shared), **arguments)
        trainer.losses, trainer.norms, trainer.margins = [], [], []
        clock = Clock()
        trainer.add_callback(clock)
        trainer.train()
    pieces = options["rows"] // options["micro"]
    result = {
        "loss": [
            sum(trainer.losses[at : at + pieces]) / (pieces if method == "dpo" else 1)
            for at in range(0, len(trainer.losses), pieces)
        ],
        "norm": trainer.norms,
        "margin": [sum(trainer.margins[at : at + pieces]) / pieces for at in range(0, len(trainer.margins), pieces)],
        "seconds": [b - a for a, b in zip(clock.ends[1:], clock.ends[2:], strict=False)],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0,
    }
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
