"""Vision-language models: loading, freezing, LoRA, 4-bit weights, packing, saving, and tiny checkpoints for a CPU."""
