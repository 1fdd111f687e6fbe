"""Rollouts: episodes of environments played by the policy, in groups, and the table that keeps them."""
