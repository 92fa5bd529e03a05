"""``tightwire bench ttft``: compares AllReduces on one server by time to first token. Open ``bench.py`` first."""
