"""Robot policies evaluated in LIBERO."""
