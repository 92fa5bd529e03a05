"""Implements ``tightwire bench stream``, which times steps with streamed weights. Start with ``bench``."""
