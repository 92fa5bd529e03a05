"""Tokenizers and chat templates. Start with `tokenizer`."""
