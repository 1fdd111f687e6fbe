"""The training engine: ranks, sharding, optimizer, checkpoints, and the HTTP service that runs them."""
