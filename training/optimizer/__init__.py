"""Builds the torch optimizer over flat shards and computes its learning rate. Start with ``make``."""
