"""ALFWorld's games: generated from a seed, or read from files that are not trusted."""
