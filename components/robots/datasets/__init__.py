"""Datasets of robot demonstrations: reading and writing LeRobot datasets, mixtures and statistics."""
