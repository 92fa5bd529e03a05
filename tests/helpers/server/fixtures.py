"""Fixtures of the HTTP tests: a scripted engine, the app over it, a client that calls the app without a socket."""

from collections.abc import AsyncIterator

import httpx
import pytest
from helpers.server.fake_engine import FakeEngine, app_for, client_of


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app_for(engine)) as client:
        yield client
