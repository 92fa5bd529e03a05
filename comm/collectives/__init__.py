"""Collectives other than AllReduce, for weights (qwZ, hpZ), gradients (qgZ, DGC) and the model's other messages.

Start with `all_gather`. The group's ledger records every call; ``phase`` and ``site`` are for it. As for an AllReduce, all
ranks call with the same shapes and dtypes in the same order, and inputs are only read. With a single rank nothing is sent or
quantized. Call ``codec.prepare_codecs`` before the first collective.
"""
