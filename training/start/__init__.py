"""The model a run starts from, its tokenizer, its loss, and its export. Start with ``model``."""
