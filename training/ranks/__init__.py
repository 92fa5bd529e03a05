"""Connects the ranks of a run and exchanges small values between them. Start with ``groups``."""
