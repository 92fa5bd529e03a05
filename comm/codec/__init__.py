"""Tensors as bytes on the wire, by codec name. Start with `codec`."""
