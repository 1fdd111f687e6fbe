"""Training of vision-language models on tokens: objectives, log-probs, micro-batches, and the trainer's worker.

Reinforcement learning and supervised training share it.
"""
