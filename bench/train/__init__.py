"""``tightwire bench train``: steps of the engine between emulated nodes, beside torch's own data parallelism."""
