"""TRL's half of the GPU benchmark. Answers are given instead of generated, so a step is an update on a batch at hand.

Usage: step_trl.py PROCESSORS RESULTS STEPS SMALL WAY..., a way being DTYPE,LIGER,RECOMPUTE,CASE,ROWS,FLASH such as
bf16,1,1,A,16,2; FLASH is the version of FlashAttention, which a CPU does without. The first update, which also scores
and processes images, is not timed.
"""

import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from step_case import GROUP_SIZE, NO_MEMORY, WORK, Case, clean, limit_memory, make_model, peak_gib, say, sync
from transformers import AutoProcessor, TrainerCallback
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler

# Liger 0.8.5 imports these, and transformers 5.23 no longer has them: without these lines TRL fails with Liger.
modeling_qwen2_5_vl.Qwen2_5_VLCausalLMOutputWithPast = CausalLMOutputWithPast
modeling_qwen3_vl.Qwen3VLCausalLMOutputWithPast = CausalLMOutputWithPast
LOADER_WORKERS = 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Given(GRPOTrainer):
    """Trainer of TRL that trains on given answers. It records the norm of each gradient and the number of computed
    tokens."""

    case: Case
    norms: list
    tokens: list

    def _get_train_sampler(self, dataset=None):
        """Return a sampler with which each prompt may have a single answer. TRL's own sampler takes each prompt
        `num_generations` times."""
        if self.case.work.shared:
            return super()._get_train_sampler(dataset)
        repeats = self.num_iterations * self.args.steps_per_generation
        return RepeatSampler(self.train_dataset, 1, self.case.work.rows, repeats, shuffle=False)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        return [ids.tolist() for ids in self.case.answers], None

    def _compute_loss(self, model, inputs):
        rows, prompt = inputs["prompt_ids"].shape
        self.tokens.append(rows * (prompt + inputs["completion_ids"].shape[1]))
        return super()._compute_loss(model, inputs)

    def _clip_grad_norm(self, model):
        norm = super()._clip_grad_norm(model)
        self.norms.append(norm)
        return norm


class Clock(TrainerCallback):
    def __init__(self):
        self.ends = []

    def on_step_end(self, *arguments, **more):
        sync()
        self.ends.append(time.perf_counter())
        if len(self.ends) == 1 and DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()


def measure(model, processor, case, text, steps, way):
    _, liger, recompute, _, micro, _ = way.split(",")
    rows = [{"prompt": [{"role": "user", "content": text}], "images": images} for images in case.images]
    n = len(case.answers)
    with tempfile.TemporaryDirectory() as scratch:
        settings = GRPOConfig(
            output_dir=scratch,
            use_cpu=DEVICE == "cpu",
            bf16=True,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            gradient_checkpointing=recompute == "1",
            gradient_checkpointing_kwargs={"use_reentrant": False} if recompute == "1" else None,
            per_device_train_batch_size=int(micro),
            gradient_accumulation_steps=n // int(micro),
            num_generations=GROUP_SIZE,
            num_iterations=steps + 1,
            max_steps=steps + 1,
            max_completion_length=int(case.lengths.max()),
            scale_rewards="none",
            shuffle_dataset=False,
            beta=0.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            remove_unused_columns=False,
            use_liger_kernel=liger == "1",
            disable_tqdm=True,
            dataloader_num_workers=LOADER_WORKERS,
        )
        trainer = Given(
            model=model,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=processor,
            reward_funcs=lambda completions, **_: case.rewards,
        )
        clock = Clock()
        trainer.case, trainer.norms, trainer.tokens = case, [], []
        trainer.add_callback(clock)
        trainer.train()
    return {
        "seconds": [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)],
        "norm": float(trainer.norms[0]),
        "computed": sum(trainer.tokens[: n // int(micro)]),
        "peak_gib": peak_gib(),
    }


def main():
    warnings.filterwarnings("ignore")
    limit_memory()
    processors, out, steps, small = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1"
    model, made = None, None
    for way in sys.argv[5:]:
        dtype, _, _, name, _, version = way.split(",")
        attention = f"flash_attention_{version}" if DEVICE == "cuda" else "sdpa"
        family = WORK[name].family
        folder = processors / family
        case, processor = Case(folder, name, small), AutoProcessor.from_pretrained(folder)
        text = case.question(processor)
        if made != family:
            model = None
            clean()
            model, made = make_model(folder, attention, DEVICE, small, "4b" if family == "qwen3-vl" else "3b"), family
        model.set_attn_implementation(attention)
        # Liger and Trainer replace methods of the instance.
        for method in ("forward", "_original_forward"):
            model.__dict__.pop(method, None)
        model.to(torch.float32 if dtype == "fp32" else torch.bfloat16)
        clean()
        try:
            result = measure(model, processor, case, text, steps, way)
            say(out, {"side": "trl", "way": way} | result)
        except torch.OutOfMemoryError:
            say(out, {"side": "trl", "way": way, "failed": NO_MEMORY})
        except Exception:
            say(out, {"side": "trl", "way": way, "failed": traceback.format_exc()[-1500:]})
        for parameter in model.parameters():
            parameter.grad = None
        clean()


if __name__ == "__main__":
    main()
