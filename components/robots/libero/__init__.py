"""LIBERO: its simulator, perturbations of it, a scripted policy and the recording of demonstrations."""
