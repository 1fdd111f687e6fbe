"""Plans of `train-vla-rl`: simulators, one policy that answers all of them, and a trainer."""
