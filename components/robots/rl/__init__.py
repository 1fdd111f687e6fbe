"""Reinforcement learning of robot policies: rollouts in LIBERO, advantages, and updates on the engine."""
