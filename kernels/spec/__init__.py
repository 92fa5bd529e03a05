"""What every kernel must compute, in torch. Start with `block_format`."""
