"""``tightwire bench ttft``: AllReduces against each other on one server, in time to first token."""
