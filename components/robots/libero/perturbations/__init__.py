"""What an episode in LIBERO begins with, changed by name and strength."""
