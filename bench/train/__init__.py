"""Implements ``tightwire bench train``: times the engine between emulated nodes against torch. Start with ``bench``."""
