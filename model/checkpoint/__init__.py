"""Reads checkpoints: safetensors, GGUF, random weights. Start with `config`."""
