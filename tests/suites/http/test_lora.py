"""Adapters over HTTP: chosen by model name, listed with their parent, loaded and unloaded only inside --lora-dir."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.server.fake_engine import INFO, FakeEngine, app_for, client_of

from tightwire.server.api.lora import Adapters
from tightwire.server.config.http import HttpOptions
from tightwire.server.config.lora import AdapterOptions
from tightwire.server.plan.rank_setup import ServedAdapter


def _client(
    engine: FakeEngine, folder: Path | None, loaded: tuple[str, ...] = (), key: str | None = None
) -> httpx.AsyncClient:
    adapters = [ServedAdapter(id=i, name=name, folder=f"/{name}", digest=name) for i, name in enumerate(loaded, 1)]
    info = replace(INFO, adapters=Adapters(adapters))
    options = AdapterOptions(lora_dir=str(folder) if folder else None)
    app = app_for(engine, info=info, adapters=options, http=HttpOptions(api_key=key))
    return client_of(app, headers={"x-api-key": key or ""})


@pytest.fixture
def lora_dir(tmp_path: Path) -> Path:
    """Two adapters inside, one outside, and links out of it."""
    root = tmp_path / "adapters"
    for folder in (root / "a", root / "sub" / "b", tmp_path / "outside"):
        folder.mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).write_text(folder.name)
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "inner").symlink_to(root / "a")
    (root / "files").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "files" / name).symlink_to(tmp_path / "outside" / name)
    return root


async def test_model_names_an_adapter_in_every_route() -> None:
    engine = FakeEngine()
    async with _client(engine, None, ("poet", "clerk")) as client:
        models = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
        assert list(models) == ["tiny", "poet", "clerk"]
        assert models["poet"] == (await client.get("/v1/models/poet")).json()
        assert (models["poet"]["parent"], models["poet"]["root"], models["tiny"]["parent"]) == ("tiny", "/poet", None)
        fingerprints = {}
        for name in ("tiny", "clerk", None):
            body = {"prompt": "Hi", "model": name}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["model"] == (name or "tiny")
            fingerprints[name] = answer["system_fingerprint"]
        chat = {"messages": [{"role": "user", "content": "Hi"}], "model": "poet"}
        assert (await client.post("/v1/chat/completions", json=chat)).json()["model"] == "poet"
        message = {**chat, "max_tokens": 5}
        assert (await client.post("/v1/messages", json=message)).json()["model"] == "poet"
        assert (await client.post("/v1/responses", json={"input": "Hi", "model": "clerk"})).json()["model"] == "clerk"
        assert [request.adapter for request in engine.submitted] == [0, 2, 0, 1, 1, 2]
        assert "lora-clerk" in fingerprints["clerk"] and fingerprints["tiny"] == fingerprints[None]
        assert (await client.post("/tokenize", json={"prompt": "Hi", "model": "poet"})).status_code == 200
        refused = await client.post("/v1/completions", json={"prompt": "Hi", "model": "nobody"})
        assert refused.status_code == 404 and "'tiny', 'poet', 'clerk'" in refused.json()["error"]["message"]
        assert (await client.get("/health")).json()["adapters"] == ["poet", "clerk"]


async def test_load_replace_and_unload(lora_dir: Path) -> None:
    engine = FakeEngine()
    async with _client(engine, lora_dir) as client:

        async def load(**body: object) -> httpx.Response:
            return await client.post("/v1/load_lora_adapter", json=body)

        card = await load(lora_name="x", lora_path="a")
        assert card.status_code == 200 and card.json()["parent"] == "tiny"
        assert engine.adapters == {1: str(lora_dir / "a")}
        again = await load(lora_name="x", lora_path=str(lora_dir / "sub" / "b"))
        assert again.status_code == 400 and "load_inplace: true" in again.json()["error"]["message"]
        assert (await load(lora_name="x", lora_path="sub/b", load_inplace=True)).status_code == 200
        assert engine.adapters == {2: str(lora_dir / "sub" / "b")}
        assert (await client.post("/v1/completions", json={"prompt": "Hi", "model": "x"})).status_code == 200
        assert engine.submitted[-1].adapter == 2
        assert (await load(lora_name="tiny", lora_path="a")).status_code == 400
        assert (await load(lora_name=" ", lora_path="a")).status_code == 400
        engine.adapter_refusal = "use_dora=True is not supported"
        refused = await load(lora_name="y", lora_path="inner")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "adapter_refused")
        gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "x", "lora_int_id": 7})
        assert gone.json() == {"id": "x", "object": "model", "deleted": True} and not engine.adapters
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "x"})).status_code == 404
        assert (await client.post("/v1/completions", json={"prompt": "Hi", "model": "x"})).status_code == 404


@pytest.mark.parametrize("path", ["../outside", "/", "link", "files", "a/../../outside", "..", "/etc"])
async def test_paths_outside_the_folder_are_refused(path: str, lora_dir: Path) -> None:
    engine = FakeEngine()
    async with _client(engine, lora_dir) as client:
        answer = await client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
        assert answer.status_code == 400 and "inside the server's --lora-dir" in answer.json()["error"]["message"]
        assert not engine.adapters


async def test_without_lora_dir_nothing_can_be_loaded_or_unloaded() -> None:
    async with _client(FakeEngine(), None, ("poet",)) as client:
        for route, body in (("load", {"lora_name": "x", "lora_path": "a"}), ("unload", {"lora_name": "poet"})):
            answer = await client.post(f"/v1/{route}_lora_adapter", json=body)
            assert answer.status_code == 403 and "--lora-dir" in answer.json()["error"]["message"]


class _Stepwise(ThreadPoolExecutor):
    """Runs a job only when it may, and counts those that came."""

    def __init__(self) -> None:
        super().__init__(1)
        self.num_jobs, self.may_run = 0, threading.Semaphore(0)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_jobs += 1
        return super().submit(lambda: fn(*args, **kwargs) if self.may_run.acquire(timeout=10) else None)


@pytest.mark.parametrize("num_done", [0, 1, 2])
async def test_a_request_that_threads_prepare_follows_a_change_of_its_adapter(num_done: int, lora_dir: Path) -> None:
    """A long one: read, made a chat or a completion, tokenized. An old version or the base model never answers it.

    A key pays for no request that never reached the engine.
    """
    engine, threads = FakeEngine(), _Stepwise()
    asyncio.get_running_loop().set_default_executor(threads)
    body = {"prompt": "Hi", "model": "x", "user": "u" * 5000}
    async with _client(engine, lora_dir, key="k") as client:

        async def paid() -> list[str]:
            return [line for line in (await client.get("/metrics")).text.splitlines() if "_key_tokens_total{" in line]

        async def change(verb: str, **body: object) -> None:
            answer = await client.post(f"/v1/{verb}_lora_adapter", json={"lora_name": "x", **body})
            assert answer.status_code == 200, answer.text

        async def ask_during(verb: str, **fields: object) -> httpx.Response:
            threads.num_jobs = 0
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            for _ in range(num_done):
                threads.may_run.release()
            while threads.num_jobs <= num_done:
                await asyncio.sleep(0.001)
            await change(verb, **fields)
            threads.may_run.release(3 - num_done)
            return await asking

        await change("load", lora_path="a")
        answer = await ask_during("load", lora_path="sub/b", load_inplace=True)
        assert (answer.status_code, answer.json()["model"], engine.submitted[-1].adapter) == (200, "x", 2)
        now = (await client.post("/v1/completions", json={"prompt": "Hi", "model": "x"})).json()
        assert answer.json()["system_fingerprint"] == now["system_fingerprint"]
        num_submitted, paid_before = len(engine.submitted), await paid()
        gone = await ask_during("unload")
        assert gone.status_code == 404 and len(engine.submitted) == num_submitted, gone.text
        assert await paid() == paid_before != []
