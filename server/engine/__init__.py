"""Turns requests into steps and steps into tokens, on rank 0. Start with `engine`."""
