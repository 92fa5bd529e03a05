"""``tightwire bench stream``: times steps with streamed weights. Open ``bench.py`` first."""
