"""GRPO in twenty lines, on a server that is up: `armature serve MODEL`."""

import sys

from armature import MultimodalGRPOTrainer, MultimodalRLConfig

config = MultimodalRLConfig(
    output_dir="outputs/trainer",
    env_id="colors",  # your own table: "dataset", and its settings as env_args
    max_steps=10,
    rollouts_per_step=128,
    batch_size=128,  # samples of an optimizer update
    micro_batch_size=128,
    max_tokens=4,
    learning_rate=3e-3,  # for a tiny model; 1e-6 for one of billions of weights
    eval_steps=5,
    vllm_server_port=int(sys.argv[2]) if len(sys.argv) > 2 else 8000,
)
trainer = MultimodalGRPOTrainer(sys.argv[1], config=config)
accuracy = trainer.train()["heldout/accuracy"]
print(f"accuracy {accuracy:.3f}; the model is in {config.folder / 'final'}")
