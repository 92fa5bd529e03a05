"""Ranks, nodes and how they find each other. Start with `group`."""
