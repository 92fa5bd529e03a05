"""Ranks, nodes, how they find each other, and their places on the cores and memory of a host. Start with `group`."""
