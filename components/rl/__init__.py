"""Reinforcement learning: the loop of rollouts, batches, training steps and weight updates, and its run and trainer."""
