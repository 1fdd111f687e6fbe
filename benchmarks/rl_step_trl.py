"""TRL's half of the benchmark of whole RL steps: GRPOTrainer with vLLM in its process, on the same GPU.

Usage: rl_step_trl.py CHECKPOINT RESULTS STEPS GROUPS GROUP_SIZE SIDE SAMPLED QUESTION WAY..., a way being
ROWS,RECOMPUTE,CORRECTION such as 16,0,0: rows of a micro-batch, gradient checkpointing, importance sampling correction.
The first step is not timed. On a CPU, to see that it runs, TRL samples by transformers instead of vLLM.

TRL 1.16 gives vLLM prompts whose image tokens are already expanded, and vLLM expands the first of them again: the
sampler sees more than the trainer, their log-probs differ by a nat, and the correction drops all that was sampled. Here
vLLM gets one token for an image, and expands it to the trainer's prompt.
"""

import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from rl_step_case import LEARNING_RATE, MODEL_LENGTH, SERVER_SHARE, TEMPERATURE, make_image, reward
from step_case import clean, peak_gib, say, sync
from step_trl import DEVICE, LOADER_WORKERS
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ATTENTION = "flash_attention_2" if DEVICE == "cuda" else "sdpa"


class Noting(GRPOTrainer):
    """Trainer of TRL that records the norms of gradients, the number of sampled tokens, and the time that sampling
    takes."""

    norms: list
    sampled: list
    laps: dict

    def _generate_single_turn(self, *arguments, **more):
        result = self._timed("sample", super()._generate_single_turn, *arguments, **more)
        self.sampled.append(sum(len(ids) for ids in result[0]))
        return result

    def _clip_grad_norm(self, model):
        norm = super()._clip_grad_norm(model)
        self.norms.append(float(norm))
        return norm

    def _timed(self, name, ask, *arguments, **more):
        sync()
        began = time.perf_counter()
        result = ask(*arguments, **more)
        sync()
        self.laps.setdefault(name, []).append(time.perf_counter() - began)
        return result


class Clock(TrainerCallback):
    def __init__(self):
        self.ends = []

    def on_step_end(self, *arguments, **more):
        sync()
        self.ends.append(time.perf_counter())


def measure(folder, processor, dataset, steps, groups, group_size, sampled, way):
    micro, recompute, correction = way.split(",")
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
            gradient_accumulation_steps=groups * group_size // int(micro),
            num_generations=group_size,
            max_steps=steps + 1,
            max_completion_length=sampled,
            temperature=TEMPERATURE,
            scale_rewards="none",
            shuffle_dataset=False,
            beta=0.0,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            remove_unused_columns=False,
            use_liger_kernel=DEVICE == "cuda",
            disable_tqdm=True,
            dataloader_num_workers=LOADER_WORKERS,
            use_vllm=DEVICE == "cuda",
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=SERVER_SHARE,
            vllm_max_model_length=MODEL_LENGTH,
            vllm_importance_sampling_correction=correction == "1",
            # Random weights would sample an image's tokens, of which TRL's model then lacks the image.
            generation_kwargs=without(placeholders(processor)),
        )
        model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation=ATTENTION, device_map=DEVICE
        )
        trainer = Noting(
            model=model,
            args=settings,
            train_dataset=dataset,
            processing_class=processor,
            reward_funcs=lambda completions, **_: [reward(one[0]["content"]) for one in completions],
        )
        clock = Clock()
        trainer.norms, trainer.sampled, trainer.laps = [], [], {}
        if settings.use_vllm:
            time_sampler(trainer, processor.image_token_id)
        trainer.add_callback(clock)
        clean()
        trainer.train()
    return {
        "seconds": [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)],
        "norms": trainer.norms,
        "sampled": trainer.sampled[1:],
        "laps": {name: taken[1:] for name, taken in trainer.laps.items()},
        "peak_gib": peak_gib(),
    }


def time_sampler(trainer, image):
    """Record how long vLLM takes to sample and to receive weights. Also pass each image to vLLM as one token."""
    sampler = trainer.vllm_generation
    generate, synced = sampler.generate, sampler.sync_weights

    def sample(prompts, **more):
        result = trainer._timed("generate", generate, prompts=[once(ids, image) for ids in prompts], **more)
        assert result[0] == prompts, "the sampler's prompts are not the trainer's"
        return result

    sampler.generate = sample
    sampler.sync_weights = lambda: trainer._timed("sync_weights", synced)


def without(tokens):
    """Return sampler settings, for vLLM or for transformers, with which these tokens are never sampled."""
    if DEVICE == "cuda":
        return {"logit_bias": dict.fromkeys(tokens, -100.0)}
    return {"suppress_tokens": tokens}


def once(ids, token):
    """Return `ids` in which each run of consecutive `token` is replaced by a single `token`."""
    return [one for place, one in enumerate(ids) if one != token or place == 0 or ids[place - 1] != token]


def placeholders(processor):
    names = ("vision_start", "vision_end", "image_pad", "video_pad")
    return [processor.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names]


def main():
    warnings.filterwarnings("ignore")
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    steps, groups, group_size, side, sampled = map(int, sys.argv[3:8])
    processor = AutoProcessor.from_pretrained(folder)
    chat = [{"role": "user", "content": sys.argv[8]}]
    rows = [{"prompt": chat, "image": make_image(side, number)} for number in range(groups * (steps + 1))]
    dataset = Dataset.from_list(rows)
    for way in sys.argv[9:]:
        try:
            result = measure(str(folder), processor, dataset, steps, groups, group_size, sampled, way)
            say(out, {"side": "trl", "way": way} | result)
        except Exception:
            say(out, {"side": "trl", "way": way, "failed": traceback.format_exc()[-1500:]})


if __name__ == "__main__":
    main()
