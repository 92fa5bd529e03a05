"""Checkpoints: saves a run and resumes it on any number of ranks. Start with ``state``."""
