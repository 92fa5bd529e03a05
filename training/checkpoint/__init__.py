"""State to files and back, on any ranks."""
