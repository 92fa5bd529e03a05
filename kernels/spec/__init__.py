"""The computation of every kernel in torch, and the byte layouts. Start with `block_format`."""
