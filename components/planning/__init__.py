"""Planning of runs: formulas for memory, seconds of a step and bottleneck of a recipe on N GPUs.

They need neither GPUs nor the model's weights.
"""
