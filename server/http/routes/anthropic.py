"""The routes of Anthropic's API: /v1/messages and /v1/messages/count_tokens."""

from fastapi import APIRouter, Request, Response

from tightwire.server.api.chat import chat_token_ids
from tightwire.server.api.errors import json_response
from tightwire.server.api.prompts import check_model
from tightwire.server.api.schemas import ChatBody
from tightwire.server.api.serving import Serving
from tightwire.server.api.tools import check_tools
from tightwire.server.dialects.messages_answer import MessagesDialect, TokenCount
from tightwire.server.dialects.messages_request import CountTokensBody
from tightwire.server.http.check_body import read_body
from tightwire.server.http.routes.openai import answer
from tightwire.server.ipc.engine_client import Phase


def anthropic_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/messages", summary="Answer a conversation, in the form of Anthropic's API")
    async def messages(request: Request) -> Response:
        return await answer(request, serving, MessagesDialect)

    @router.post("/v1/messages/count_tokens", summary="Count the prompt tokens of a message")
    async def count_tokens(request: Request) -> Response:
        model = serving.require_model(Phase.DRAINING)
        asked = await read_body(request, CountTokensBody, serving)
        check_model(asked.model, model.info)
        chat = ChatBody.model_construct(**asked.chat_fields())
        check_tools(chat.tools, chat.tool_choice)
        tools = () if chat.tool_choice == "none" else chat.tools
        return json_response(TokenCount(len(await chat_token_ids(model, chat.messages, chat, tools))))

    return router
