"""The LIBERO simulator: tasks, initial states, cameras, and an expert."""
