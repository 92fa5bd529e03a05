"""Reads text files and packs them into the token sequences of each step. Start with ``documents``."""
