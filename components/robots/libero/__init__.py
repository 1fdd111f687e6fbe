"""The LIBERO simulator, a scripted policy in it, and the demonstrations that it gives."""
