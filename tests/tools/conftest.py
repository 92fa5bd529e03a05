"""Fixtures of the HTTP tests."""

from helpers.server.fixtures import client, engine

__all__ = ["client", "engine"]
