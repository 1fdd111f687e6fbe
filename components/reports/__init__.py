"""Pages for people: rollouts to look at, learning curves, results. Each is one file that works offline."""
