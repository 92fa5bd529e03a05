"""The folder a run starts from, and the one it ends in."""
