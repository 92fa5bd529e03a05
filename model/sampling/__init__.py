"""Chooses the next tokens from logits. Start with `sampler`; `parameters` has the request's parameters."""
