"""Training on the same comm layer as the server. Start with ``run.run``."""
