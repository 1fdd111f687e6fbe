"""Output heads: backends that compute log-probs and entropies of tokens from hidden states."""
