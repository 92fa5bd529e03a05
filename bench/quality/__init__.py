"""``tightwire bench quality``: measures what quantized AllReduces cost a model in accuracy. Open ``bench.py`` first."""
