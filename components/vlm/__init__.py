"""The losses and batches that reinforcement learning and supervised training of vision-language models share."""
