"""The HTTP routes, one router per file. Start with `api`."""
