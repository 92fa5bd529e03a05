"""Messages between the HTTP process and rank 0. Start with `messages`."""
