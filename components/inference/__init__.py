"""The pool of vLLM servers: start and monitor servers, route requests to them, and update their weights."""
