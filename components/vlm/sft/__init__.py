"""Warm start: supervised training on demonstrations before reinforcement learning."""
