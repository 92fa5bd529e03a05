"""The routes of OpenAI's API, /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, and vLLM's /tokenize, /detokenize, /tokenizer_info."""

import math
from typing import Any

from fastapi import APIRouter, Request, Response

from tightwire.server.api.answer import Answer, Dialect
from tightwire.server.api.bodies import Detokenized, ModelCard, ModelList, Tokenized, TokenizerInfo
from tightwire.server.api.chat import ChatDialect, chat_token_ids
from tightwire.server.api.completions import CompletionDialect
from tightwire.server.api.errors import ApiError, invalid, json_response
from tightwire.server.api.prompts import check_ids, check_model, check_options, make_sequences, run_off_loop
from tightwire.server.api.schemas import DetokenizeBody, TokenizeBody
from tightwire.server.api.serving import ServedModel, Serving
from tightwire.server.api.trace import RequestTrace
from tightwire.server.dialects.responses_answer import ResponsesDialect
from tightwire.server.http.check_body import read_body
from tightwire.server.ipc.engine_client import Phase


def openai_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat(request: Request) -> Response:
        return await answer(request, serving, ChatDialect)

    @router.post("/v1/completions", summary="Continue one or several prompts")
    async def completions(request: Request) -> Response:
        return await answer(request, serving, CompletionDialect)

    @router.post("/v1/responses", summary="Answer a conversation, in the form of OpenAI's newer API")
    async def responses(request: Request) -> Response:
        return await answer(request, serving, ResponsesDialect)

    @router.post("/v1/responses/{rest}/cancel", include_in_schema=False)
    @router.api_route("/v1/responses/{rest:path}", methods=["GET", "DELETE"], include_in_schema=False)
    async def stored_responses(rest: str) -> Response:
        message = "this server stores no responses; send the whole conversation as input of POST /v1/responses"
        raise ApiError(404, message, code="not_stored")

    @router.get("/v1/models", summary="List the served model and its LoRA adapters")
    async def list_models() -> Response:
        info = serving.require_model(Phase.DRAINING).info
        adapters = [ModelCard.of_adapter(info, adapter) for adapter in info.adapters.by_name.values()]
        return json_response(ModelList(data=[*(ModelCard.of_model(info, name) for name in info.names), *adapters]))

    # Names may contain slashes, as repository names do.
    @router.get("/v1/models/{model_id:path}", summary="Look a model up")
    async def get_model(model_id: str) -> Response:
        info = serving.require_model(Phase.DRAINING).info
        check_model(model_id, info)
        adapter = info.adapter(model_id)
        return json_response(ModelCard.of_adapter(info, adapter) if adapter else ModelCard.of_model(info, model_id))

    @router.post("/v1/embeddings", include_in_schema=False)
    async def embeddings() -> Response:
        raise ApiError(
            404,
            "the served model generates text and has no embeddings; send this request to a server with an embedding model",
            code="embeddings_not_supported",
        )

    @router.post("/tokenize", summary="Text to token ids")
    async def tokenize(request: Request) -> Response:
        model = serving.require_model(Phase.DRAINING)
        body = await read_body(request, TokenizeBody, serving)
        check_model(body.model, model.info)
        ids = await _token_ids(body, model)
        names = [model.tokens.text_of(token_id) for token_id in ids] if body.return_token_strs else None
        return json_response(Tokenized(len(ids), model.info.max_model_len, ids, names))

    @router.post("/detokenize", summary="Token ids to text")
    async def detokenize(request: Request) -> Response:
        model = serving.require_model(Phase.DRAINING)
        body = await read_body(request, DetokenizeBody, serving)
        check_model(body.model, model.info)
        check_ids(body.tokens, model.info, "tokens")
        text = await run_off_loop(lambda: model.tokenizer.decode(body.tokens, False), len(body.tokens))
        return json_response(Detokenized(prompt=text))

    @router.get("/tokenizer_info", summary="The tokenizer's special tokens and chat template")
    async def tokenizer_info() -> Response:
        return json_response(TokenizerInfo.of(serving.require_model(Phase.DRAINING).tokenizer))

    return router


async def answer(request: Request, serving: Serving, dialect_type: type[Dialect[Any]]) -> Response:
    """Read the request's body and answer it in this API. Raises ApiError."""
    model = serving.require_model()
    asked = await read_body(request, dialect_type.body_type, serving)
    asked.set_missing(model.info.sampling)
    check_model(asked.model, model.info)
    dialect = dialect_type(asked, model)
    body = dialect.body
    try:
        check_options(body, model.info, serving.http.max_queued_requests)
        trace = RequestTrace(serving.engine, serving.metrics, request.state.record, streamed=body.stream)
        with trace.tokenizing():
            prompts = await dialect.prompts()
            # The first grammar imports llguidance, and a large schema takes long to check; the first bad word sorts all tokens.
            num_chars = math.inf if body.has_form or body.bad_words else 0
            sequences = await run_off_loop(lambda: make_sequences(body, model, prompts), num_chars)
    except ApiError as error:
        raise dialect.in_own_words(error) from None
    return await Answer(serving, dialect, sequences, trace).respond(request)


async def _token_ids(body: TokenizeBody, model: ServedModel) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages", param="prompt")
    if body.messages is not None:
        return await chat_token_ids(model, body.messages, body)
    text = body.prompt or ""
    return await run_off_loop(lambda: model.tokenizer.encode(text, body.add_special_tokens), len(text))
