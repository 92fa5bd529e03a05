"""The routes of OpenAI's and Anthropic's APIs, and vLLM's for tokens and LoRA adapters."""

import math
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from tightwire.server.api import request_bodies, response_bodies
from tightwire.server.api.answer import Answer, Dialect
from tightwire.server.api.chat import ChatDialect, chat_token_ids
from tightwire.server.api.completions import CompletionDialect
from tightwire.server.api.errors import ApiError, invalid, json_response
from tightwire.server.api.prompts import check_ids, check_options, make_sequences, run_off_loop
from tightwire.server.api.serving import ServedModel, Serving
from tightwire.server.api.trace import RequestTrace
from tightwire.server.dialects.adapted import AdaptedBody, AdaptedDialect
from tightwire.server.dialects.messages_answer import MessagesDialect, TokenCount
from tightwire.server.dialects.messages_request import CountTokensBody
from tightwire.server.dialects.responses_answer import InputTokens, ResponsesDialect
from tightwire.server.dialects.responses_request import ResponsesBody
from tightwire.server.http.check_body import read_body
from tightwire.server.ipc.engine_client import Phase

_BodyT = TypeVar("_BodyT", bound=request_bodies.Body)


def api_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    async def read(request: Request, kind: type[_BodyT]) -> tuple[ServedModel, _BodyT]:
        """The model and the request's body; for routes that a server which shuts down answers too."""
        model = serving.require_model(Phase.DRAINING)
        body = await read_body(request, kind, serving)
        model.info.adapter(body.model)
        return model, body

    async def num_prompt_tokens(request: Request, kind: type[AdaptedDialect], body_kind: type[AdaptedBody]) -> int:
        model, body = await read(request, body_kind)
        dialect = await run_off_loop(lambda: kind(body, model), request.state.num_bytes)
        try:
            [prompt] = await dialect.prompts()
        except ApiError as error:
            raise dialect.in_own_words(error) from None
        return len(prompt.token_ids)

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat(request: Request) -> Response:
        return await answer(request, serving, ChatDialect)

    @router.post("/v1/completions", summary="Continue one or several prompts")
    async def completions(request: Request) -> Response:
        return await answer(request, serving, CompletionDialect)

    @router.post("/v1/responses", summary="Answer a conversation, in the form of OpenAI's newer API")
    async def responses(request: Request) -> Response:
        return await answer(request, serving, ResponsesDialect)

    @router.post("/v1/responses/input_tokens", summary="Count the prompt tokens of a response")
    async def input_tokens(request: Request) -> Response:
        return json_response(InputTokens(await num_prompt_tokens(request, ResponsesDialect, ResponsesBody)))

    @router.api_route("/v1/responses/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def stored_responses(rest: str) -> Response:
        message = "this server stores no responses; send the whole conversation to POST /v1/responses"
        raise ApiError(404, message, code="not_stored")

    @router.post("/v1/messages", summary="Answer a conversation, in the form of Anthropic's API")
    async def messages(request: Request) -> Response:
        return await answer(request, serving, MessagesDialect)

    @router.post("/v1/messages/count_tokens", summary="Count the prompt tokens of a message")
    async def count_tokens(request: Request) -> Response:
        return json_response(TokenCount(await num_prompt_tokens(request, MessagesDialect, CountTokensBody)))

    @router.get("/v1/models", summary="List the served model and its LoRA adapters")
    async def list_models() -> Response:
        info = serving.require_model(Phase.DRAINING).info
        cards = [response_bodies.ModelCard.of(info, name) for name in (*info.names, *info.adapters.by_name)]
        return json_response(response_bodies.ModelList(cards, cards[0].id, cards[-1].id))

    # Names may contain slashes, as repository names do.
    @router.get("/v1/models/{model_id:path}", summary="Look a model up")
    async def get_model(model_id: str) -> Response:
        return json_response(response_bodies.ModelCard.of(serving.require_model(Phase.DRAINING).info, model_id))

    @router.post("/v1/embeddings", include_in_schema=False)
    async def embeddings() -> Response:
        message = "the served model has no embeddings; send this request to a server with an embedding model"
        raise ApiError(404, message, code="embeddings_not_supported")

    @router.post("/tokenize", summary="Text to token ids")
    async def tokenize(request: Request) -> Response:
        model, body = await read(request, request_bodies.TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give either prompt or messages", param="prompt")
        if body.messages is not None:
            ids = await chat_token_ids(model, body.messages, body, body.tools)
        else:
            text = body.prompt or ""
            ids = await run_off_loop(lambda: model.tokenizer.encode(text, body.add_special_tokens), len(text))
        names = [model.tokens.text_of(token_id) for token_id in ids] if body.return_token_strs else None
        return json_response(response_bodies.Tokenized(len(ids), model.info.plan.max_model_len, ids, names))

    @router.post("/detokenize", summary="Token ids to text")
    async def detokenize(request: Request) -> Response:
        model, body = await read(request, request_bodies.DetokenizeBody)
        check_ids(body.tokens, model.info, "tokens")
        text = await run_off_loop(lambda: model.tokenizer.decode(body.tokens, False), len(body.tokens))
        return json_response(response_bodies.Detokenized(prompt=text))

    @router.get("/tokenizer_info", summary="The tokenizer's special tokens and chat template")
    async def tokenizer_info() -> Response:
        return json_response(response_bodies.TokenizerInfo.of(serving.require_model(Phase.DRAINING).tokenizer))

    @router.post("/v1/load_lora_adapter", summary="Load a LoRA adapter of --lora-dir on all ranks")
    async def load(request: Request) -> Response:
        info = serving.require_model().info
        body = await read_body(request, request_bodies.LoadAdapterBody, serving)
        if body.lora_name in info.names:
            raise invalid(f"{body.lora_name!r} is the base model's name", "lora_name")
        options = serving.adapters
        await info.adapters.load(serving.engine, options, body.lora_name, body.lora_path, replace=body.load_inplace)
        return json_response(response_bodies.ModelCard.of(info, body.lora_name))

    @router.post("/v1/unload_lora_adapter", summary="Unload a LoRA adapter; requests that run finish with it")
    async def unload(request: Request) -> Response:
        info = serving.require_model().info
        body = await read_body(request, request_bodies.UnloadAdapterBody, serving)
        await info.adapters.unload(serving.engine, serving.adapters, body.lora_name)
        return json_response(response_bodies.ModelDeleted(id=body.lora_name))

    return router


async def answer(request: Request, serving: Serving, dialect_type: type[Dialect[Any]]) -> Response:
    """Read the request's body and answer it in this API. Raises ApiError."""
    model = serving.require_model(counted=True)
    asked = await read_body(request, dialect_type.body_type, serving)
    asked.set_missing(model.info.sampling)
    dialect = await run_off_loop(lambda: dialect_type(asked, model), num_bytes := request.state.num_bytes)
    body = dialect.body
    try:
        check_options(body, model.info, serving.http.max_queued_requests)
        trace = RequestTrace(serving.engine, serving.metrics, request.state.record, streamed=body.stream)
        with trace.tokenizing():
            prompts = await dialect.prompts()
            # The first grammar imports llguidance, and a large schema takes long to check; the first bad word sorts all tokens.
            size = math.inf if body.has_form or body.bad_words else num_bytes
            sequences = await run_off_loop(lambda: make_sequences(body, model, prompts), size)
    except ApiError as error:
        raise dialect.in_own_words(error) from None
    return await Answer(serving.engine, dialect, sequences, trace).respond(request)
