"""Reinforcement learning: the loop that joins rollouts, batches, training steps and new weights."""
