"""Wires by name, and real slow ones between processes of one machine."""
