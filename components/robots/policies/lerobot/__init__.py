"""Policies that LeRobot computes, in a process of LeRobot's environment."""
