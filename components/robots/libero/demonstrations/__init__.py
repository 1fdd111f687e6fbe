"""Demonstrations by the scripted policy in LIBERO, recorded as a LeRobot dataset."""
