"""Demonstrations by the scripted expert in LIBERO, recorded as a LeRobot dataset."""
