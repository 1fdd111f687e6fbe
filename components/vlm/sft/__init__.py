"""Supervised training: on the user's conversations, or on demonstrations before reinforcement learning."""
