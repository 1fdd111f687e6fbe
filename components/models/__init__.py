"""Vision-language models by family: loading, freezing, LoRA, saving, and tiny checkpoints for a CPU."""
