"""The LIBERO simulator: tasks, initial states, cameras, and a scripted policy."""
