"""Formulas for the bytes, operations, memory and seconds of a training step. Start with ``step``."""
