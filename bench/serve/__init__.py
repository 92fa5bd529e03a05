"""``tightwire bench serve``: load on any server that speaks OpenAI's dialect."""
