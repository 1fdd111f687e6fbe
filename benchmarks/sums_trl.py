"""TRL's half of the learning curves on released weights: GRPOTrainer with the settings of train-vlm/smollm2-sums.

Usage: sums_trl.py FOLDER RESULT SEED OPTIONS. FOLDER has `model`, a language model, and `tasks.json`: for each
split the chats and their answers. OPTIONS is a JSON object: `steps`, `every` (steps
between evaluations), `groups`, `size` (answers to a prompt), `tokens`, `learning_rate`. RESULT gets the share of
correct held-out answers by step and the seconds of each step.
"""

import json
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

CUDA = torch.cuda.is_available()
BATCH = 512
"""Most held-out questions that are answered at once."""


def correct(text, answer):
    """Return 1 if the last number in the text is the answer, else 0."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
    return float(bool(numbers) and float(numbers[-1]) == float(answer))


class Curve(TrainerCallback):
    """Samples answers to the held-out questions before the first step and every few steps. Takes the time of steps."""

    def __init__(self, tokenizer, chats, answers, options):
        self.tokenizer, self.answers, self.options = tokenizer, answers, options
        self.prompts = [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats
        ]
        self.accuracy, self.seconds = {}, []

    def on_train_begin(self, args, state, control, model=None, **more):
        self.evaluate(0, model)

    def on_step_begin(self, *arguments, **more):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, model=None, **more):
        if CUDA:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)
        if state.global_step % self.options["every"] == 0:
            self.evaluate(state.global_step, model)

    @torch.no_grad()
    def evaluate(self, step, model):
        random = torch.random.get_rng_state(), torch.cuda.get_rng_state_all() if CUDA else []
        torch.manual_seed(step)
        grades = []
        for start in range(0, len(self.prompts), BATCH):
            texts = self.prompts[start : start + BATCH]
            batch = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
            sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
            ids = model.generate(
                **batch, **sampling, max_new_tokens=self.options["tokens"], pad_token_id=self.tokenizer.pad_token_id
            )
            answers = self.tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            grades += map(correct, answers, self.answers[start : start + BATCH])
        self.accuracy[step] = sum(grades) / len(grades)
        torch.random.set_rng_state(random[0])
        if CUDA:
            torch.cuda.set_rng_state_all(random[1])
        print(f"step {step}: {self.accuracy[step]:.3f}", flush=True)


def main():
    warnings.filterwarnings("ignore")
    folder, out, seed, options = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    tasks = json.loads((folder / "tasks.json").read_text())
    rows = [{"prompt": chat, "answer": answer} for chat, answer in zip(*tasks["train"], strict=True)]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    curve = Curve(tokenizer, *tasks["heldout"], options)
    with tempfile.TemporaryDirectory() as scratch:
        settings = GRPOConfig(
            output_dir=scratch,
            use_cpu=not CUDA,
            bf16=False,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            gradient_checkpointing=False,
            per_device_train_batch_size=options["groups"] * options["size"],
            num_generations=options["size"],
            max_steps=options["steps"],
            max_completion_length=options["tokens"],
            temperature=1.0,
            loss_type="bnpo",  # the mean over the tokens of the update
            scale_rewards="group",
            beta=0.0,
            learning_rate=options["learning_rate"],
            lr_scheduler_type="constant",
            seed=seed,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            reward_funcs=lambda completions, answer, **_: [
                correct(one[0]["content"], right) for one, right in zip(completions, answer, strict=True)
            ],
            callbacks=[curve],
        )
        trainer.train()
    out.write_text(json.dumps({"accuracy": curve.accuracy, "seconds": curve.seconds}))


if __name__ == "__main__":
    main()
