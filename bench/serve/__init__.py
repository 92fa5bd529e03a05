"""``tightwire bench serve``: measures any server with an OpenAI API under load. Start at ``bench.py``."""
