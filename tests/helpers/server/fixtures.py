"""Fixtures of the HTTP tests: a scripted engine, the app over it, a client that calls the app without a socket."""

from collections.abc import AsyncIterator

import httpx
import pytest
from helpers.server.fake_engine import FakeEngine, app_for


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app_for(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        yield client
