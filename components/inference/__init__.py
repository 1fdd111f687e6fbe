"""vLLM servers behind a pool: start, watch, ask, and give new weights to."""
