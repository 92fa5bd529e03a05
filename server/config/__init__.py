"""The options of `serve` and the flags derived from them. Start with `serve`."""
