"""Robot demonstrations: LeRobot datasets read and written, and the statistics that normalize them."""
