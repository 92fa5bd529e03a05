"""The LoRA adapters that clients may name, and loading and unloading them while the server runs."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from tightwire.model.adapters.peft import CONFIG_FILE, WEIGHTS_FILE
from tightwire.server.api.errors import ApiError, invalid
from tightwire.server.config.lora import AdapterOptions
from tightwire.server.ipc.engine_client import EngineClient
from tightwire.server.plan.rank_setup import ServedAdapter

_MAX_NAME = 200


class Adapters:
    def __init__(self, loaded: Sequence[ServedAdapter] = ()) -> None:
        self.by_name = {adapter.name: adapter for adapter in loaded}
        self._ids = itertools.count(max((adapter.id for adapter in loaded), default=0) + 1)
        self._changing = asyncio.Lock()

    async def load(self, engine: EngineClient, options: AdapterOptions, name: str, path: str, *, replace: bool) -> None:
        """Load ``path`` on all ranks; requests may name it once this returns. Another version stays until then.

        Requests that run with a replaced version finish with it. ApiError 400, 403: refused, with the reason.
        """
        folder = confined(path, options)
        if not name.strip() or len(name) > _MAX_NAME:
            raise invalid(f"lora_name must have 1 to {_MAX_NAME} characters", "lora_name")
        async with self._changing:
            before = self.by_name.get(name)
            if before is not None and not replace:
                message = f"the adapter {name!r} is already loaded; unload it, or send load_inplace: true"
                raise invalid(message, "lora_name")
            adapter = next(self._ids)
            digest = await engine.load_adapter(adapter, str(folder))
            self.by_name[name] = ServedAdapter(id=adapter, name=name, folder=str(folder), digest=digest)
            if before is not None:
                engine.unload_adapter(before.id)

    async def unload(self, engine: EngineClient, options: AdapterOptions, name: str) -> None:
        """Forget an adapter: new requests get 404, and those that run finish. ApiError 403: off; 404: not loaded."""
        _require_runtime(options)
        async with self._changing:
            adapter = self.by_name.get(name)
            if adapter is None:
                message = f"there is no adapter {name[:_MAX_NAME]!r}; GET /v1/models lists the loaded ones"
                raise ApiError(404, message, param="lora_name", code="model_not_found")
            engine.unload_adapter(adapter.id)
            del self.by_name[name]


def confined(path: str, options: AdapterOptions) -> Path:
    """Return the adapter's folder, which with its files, links resolved, must be inside --lora-dir; ApiError otherwise."""
    root = _require_runtime(options)
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # too long, or a circle of links
        folder = (root / path).resolve()
        files = folder, folder / CONFIG_FILE, folder / WEIGHTS_FILE
        if all(file.resolve().is_relative_to(root) for file in files):
            return folder
    raise invalid("lora_path must be a folder inside the server's --lora-dir, also where links lead", "lora_path")


def _require_runtime(options: AdapterOptions) -> Path:
    if options.lora_dir is None:
        message = "adapters cannot be loaded or unloaded while this server runs; start it with --lora-dir FOLDER"
        raise ApiError(403, message, code="lora_dir")
    return Path(os.path.expanduser(options.lora_dir)).resolve()
