"""GET /v1/models and /v1/models/{id}."""

import msgspec
from fastapi import APIRouter, Response

from tightwire.server.api.prompts import make_unknown_model_error
from tightwire.server.api.responses import ModelCard, ModelList
from tightwire.server.api.serving import ModelInfo, Serving
from tightwire.server.http.openapi import operation


def models_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models", openapi_extra=operation(ModelList, errors=(503,)), summary="List the served model")
    async def list_models() -> Response:
        return _json(ModelList(data=[_card(serving.require_model().info)]))

    # Names may contain slashes, as repository names do.
    @router.get(
        "/v1/models/{model_id:path}", openapi_extra=operation(ModelCard, errors=(404, 503)), summary="Look a model up"
    )
    async def get_model(model_id: str) -> Response:
        info = serving.require_model().info
        if model_id != info.name:
            raise make_unknown_model_error(model_id, info)
        return _json(_card(info))

    return router


def _card(info: ModelInfo) -> ModelCard:
    return ModelCard(id=info.name, created=info.created, max_model_len=info.max_model_len, root=info.root)


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
