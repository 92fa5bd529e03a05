"""Chooses the next tokens from logits. Start with `sampler`."""
