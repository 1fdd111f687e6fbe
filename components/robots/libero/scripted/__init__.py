"""A program that solves tasks by what it knows of the scene: it shows a policy how."""
