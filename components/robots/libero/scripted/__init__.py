"""A scripted policy that solves tasks with the simulator's state, to record demonstrations."""
