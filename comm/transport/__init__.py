"""Ways to move bytes between ranks; each transport implements ``Transport`` (comm/protocols.py). Start with `in_process`."""
