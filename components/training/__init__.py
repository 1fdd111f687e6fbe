"""The training engine: ranks, sharding, optimizer, checkpoints, and the service that runs them."""
