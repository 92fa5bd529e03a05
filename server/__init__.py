"""Floor 3: requests. Scheduling, HTTP, processes and the command line; it never calls a collective itself."""
