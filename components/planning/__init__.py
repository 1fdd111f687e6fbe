"""Memory, seconds of a step and bottleneck of a recipe on N GPUs, by formulas that need neither GPUs nor weights."""
