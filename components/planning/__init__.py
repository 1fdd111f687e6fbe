"""What a recipe would take on a cluster: the loop, the pool's routing and the schedule on a virtual clock."""
