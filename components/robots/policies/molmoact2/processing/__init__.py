"""Observations to what the model is given, and its answers back to actions."""
