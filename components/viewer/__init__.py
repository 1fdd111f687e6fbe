"""Every run of a store in a local page, while it runs: curves, and every step's rollouts."""
