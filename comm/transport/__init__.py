"""Ways to move bytes between ranks; each file implements the ``Transport`` seam (comm/protocols.py)."""
