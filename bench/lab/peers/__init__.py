"""Compares Tightwire with other programs on one machine. Open ``run`` first; README.md says how to install them."""
