"""Compares what servers answer with the model itself, in float32."""
