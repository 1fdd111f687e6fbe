"""Pages for people: rollouts, learning curves, results. Each is one file that works offline."""
