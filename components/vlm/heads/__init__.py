"""Output heads: from hidden states to log-probs and entropies."""
