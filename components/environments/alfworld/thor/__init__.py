"""Games in AI2-THOR: the player, the agent in it, and the rewards."""
