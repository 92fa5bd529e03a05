"""Benchmarks of a running server and of its parts. A bench talks to a server as any client would: over HTTP."""
