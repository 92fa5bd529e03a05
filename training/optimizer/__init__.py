"""The optimizer over shards, and its learning rate."""
