"""The HTTP application: listener, middleware, API key, request parsing, routes. Start with `app`."""
