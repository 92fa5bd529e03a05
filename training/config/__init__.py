"""The configuration of a run: YAML in, checked values out, without importing torch. Start with ``tree``."""
