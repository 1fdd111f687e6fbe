"""The machine that a run is on: processes, workers, GPUs, ports, private files, and the modules of a user's project."""
