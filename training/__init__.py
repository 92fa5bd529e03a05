"""Floor 3, beside the server: offline training over the same comm layer."""
