"""Robot policies: datasets, statistics, policies, imitation, reinforcement learning, LIBERO and the policy server."""
