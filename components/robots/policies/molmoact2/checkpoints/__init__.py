"""A policy on disk: the released layout and LeRobot's, read and written."""
