"""The HTTP application. Start with `app`."""
