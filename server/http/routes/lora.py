"""vLLM's routes that load and unload LoRA adapters while the server runs."""

from fastapi import APIRouter, Request, Response

from tightwire.server.api.bodies import ModelCard, ModelDeleted
from tightwire.server.api.errors import invalid, json_response
from tightwire.server.api.schemas import LoadAdapterBody, UnloadAdapterBody
from tightwire.server.api.serving import Serving
from tightwire.server.http.check_body import read_body


def adapters_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/load_lora_adapter", summary="Load a LoRA adapter of --lora-dir on all ranks")
    async def load(request: Request) -> Response:
        info = serving.require_model().info
        body = await read_body(request, LoadAdapterBody, serving)
        if body.lora_name in info.names:
            raise invalid(f"{body.lora_name!r} is the base model's name", "lora_name")
        options = serving.adapters
        await info.adapters.load(serving.engine, options, body.lora_name, body.lora_path, replace=body.load_inplace)
        return json_response(ModelCard.of_adapter(info, info.adapters.by_name[body.lora_name]))

    @router.post("/v1/unload_lora_adapter", summary="Unload a LoRA adapter; requests that run finish with it")
    async def unload(request: Request) -> Response:
        info = serving.require_model().info
        body = await read_body(request, UnloadAdapterBody, serving)
        await info.adapters.unload(serving.engine, serving.adapters, body.lora_name)
        return json_response(ModelDeleted(id=body.lora_name))

    return router
