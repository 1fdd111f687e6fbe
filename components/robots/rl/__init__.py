"""Reinforcement learning of robot policies in LIBERO: rollouts, advantages and updates."""
