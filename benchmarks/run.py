"""`make bench`: run the benchmarks that are named, or all."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Benchmark:
    """A benchmark module. It has a function `measure() -> list[Row]`, or `record()` if it needs a machine with a
    GPU."""

    module: str
    title: str
    question: str
    gpu: str | None = None


BENCHMARKS = {
    "logprobs": Benchmark(
        "logprobs",
        "Log-prob memory",
        "What do the log-probs of a micro-batch cost in memory, forward and backward, with logits of the response "
        "tokens alone, at once and in chunks, against logits for all positions? All give the same gradients.",
        gpu="logprobs_gpu",
    ),
    "batches": Benchmark(
        "batches",
        "Batches",
        "How fast are batches built from rollouts, written and loaded, and how many bytes do references to stored "
        "images save against storing pixel values?",
    ),
    "checkpoints": Benchmark(
        "checkpoints",
        "Memory of a checkpoint",
        "How much host memory does a rank need to save a checkpoint of a model that is split over two ranks, against "
        "its shard of the weights and the optimizer's moments?",
    ),
    "overhead": Benchmark(
        "overhead",
        "Orchestration",
        "What does a step cost besides generating, training and syncing: the loop over units on threads, and as "
        "Prefect tasks, against calling the same functions in a bare loop?",
    ),
    "view": Benchmark(
        "view",
        "Looking at a million rollouts",
        "How long does a filter of `armature view` take, which counts, averages and sorts, against counting alone "
        "in the same Parquet tables?",
    ),
    "store": Benchmark(
        "store",
        "Artifact store",
        "What does a store of a million images cost against one of a thousand, and how fast do small files reach S3 "
        "(moto's server behind a stand-in for a network), against one after another?",
    ),
    "scale": Benchmark(
        "scale",
        "From a thousand to a million rollouts",
        "What do requests to `armature view` and actions of the store cost with a million rollouts and images against "
        "a thousand? A thousand rollouts are a step; each step adds a training and an evaluation to the list of runs.",
    ),
    "alfworld": Benchmark(
        "alfworld",
        "ALFWorld",
        "How fast do text games step and reset in one process that plays many, and what does a game cost in memory, "
        "against alfworld's own environment? Both say the same, word for word.",
    ),
    "quantiles": Benchmark(
        "quantiles",
        "Quantile statistics",
        "How long do exact statistics of a dataset as large as LIBERO take against plain numpy, and what does one "
        "outlier do to quantiles that are estimated from bins?",
    ),
    "frames": Benchmark(
        "frames",
        "Samples of robot datasets",
        "How many frames, each with two images and a chunk of actions, are read at random per second, against "
        "opening the files again for each?",
    ),
    "large_dataset": Benchmark(
        "large_dataset",
        "A million episodes",
        "What does a robot dataset of a million episodes and 20,000 video files cost a node before and while it is "
        "used, against objects for each episode, reading all of it, and one worker?",
    ),
    "episodes": Benchmark(
        "episodes",
        "Evaluation in LIBERO",
        "How many episodes does an evaluation play per minute with several at once and one policy that answers all, "
        "against one after the other? Both give the same results, byte for byte.",
    ),
    "policy_server": Benchmark(
        "policy_server",
        "Policy server",
        "How long do 50 robots that ask at once wait for their answers, each asking again as soon as it has one, "
        "against the time that the policy alone needs for 50 answers, without sockets and messages?",
    ),
    "processor": Benchmark(
        "processor",
        "Robot examples",
        "How many robot examples per second does one core encode, against the released steps by the usual libraries, "
        "with equal tokens and pixels?",
    ),
    "libero": Benchmark(
        "libero",
        "LIBERO",
        "How fast does the simulator step, reset and draw against LIBERO's own environment, with the same images, and "
        "what do two processes gain over one?",
    ),
    "in_flight": Benchmark(
        "in_flight",
        "Uneven episodes",
        "How long is a step where some episodes take thirty times as long as others, if weights change while episodes "
        "are played and those of the next steps begin as there is room, against generating and training in turn?",
    ),
    "rollout_workers": Benchmark(
        "rollout_workers",
        "Rollouts by workers",
        "What do 1,024 episodes at once cost a run's process and each host, if actors on four nodes of a Ray cluster "
        "(raylets of this machine) collect them, against one process? And what would simulators of LIBERO need?",
    ),
    "pool": Benchmark(
        "pool",
        "Server pool",
        "How much throughput does the pool cost against sending the same requests to the bare server?",
    ),
    "determinism": Benchmark(
        "determinism",
        "The same seed gives the same run",
        "What does it cost on CPU that a server's answer to a request has the same bits alone and among others?",
    ),
    "trl": Benchmark(
        "trl_step",
        "Trainer step",
        "How much CPU time does an optimizer step take against TRL's GRPOTrainer: same tiny model, image, tokens and "
        "advantages, fp32, one thread, generation not counted on either side?",
        gpu="step_gpu",
    ),
}


def main(names: list[str]) -> int:
    from benchmarks.table import keep

    if unknown := sorted(set(names) - set(BENCHMARKS)):
        print(f"no benchmark is called {unknown[0]!r}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    for name in names or BENCHMARKS:
        benchmark = BENCHMARKS[name]
        print(f"\n{benchmark.title} ({name})", flush=True)
        if benchmark.gpu and _has_gpu():
            import_module(f"benchmarks.{benchmark.gpu}").record()
            continue
        rows = import_module(f"benchmarks.{benchmark.module}").measure()
        for row in rows:
            print(f"  {row}", flush=True)
        keep(name, rows)
    return 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
