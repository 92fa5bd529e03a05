"""``tightwire bench quality``: what quantized AllReduces cost a model in accuracy, and which is the cheapest that fits."""
