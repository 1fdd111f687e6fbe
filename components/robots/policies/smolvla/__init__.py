"""SmolVLA (arXiv 2506.01844): a policy of 450 M parameters, in LeRobot's format of checkpoints."""
