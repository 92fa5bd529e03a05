"""The torch optimizer over sharded parameters, and its learning rate. Start with ``make``."""
