"""Perturbations of LIBERO: changes of the scene, the robot's pose and the instruction, to test robustness."""
