"""Request bodies: the supported fields of OpenAI's API and of vLLM's sampling extensions, with their ranges.

Strict: a string is not accepted as a number, and an unknown field is an error. OpenAI's other fields are in two tables:
those that can be ignored without changing an answer, and those that cannot. A top-level ``null`` means "not given".
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from tightwire.model.sampling.parameters import SamplingParams

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_N = 128
MAX_LOGPROBS = 20
MAX_SALT_CHARS = 256

# Accepted and ignored: they label a request for billing, storage or routing and do not change an answer.
IGNORED_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",  # configures tools, which are not supported
        "prediction",  # a hint for speed
    }
)

# Fields of OpenAI that are not supported: the values that are accepted because they have no effect, and advice.
UNSUPPORTED_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), "tool calling is not supported; describe the tools in the messages"),
    "tool_choice": (("none", "auto"), "tool calling is not supported"),
    "functions": (([],), "function calling is not supported; describe the functions in the messages"),
    "function_call": (("none", "auto"), "function calling is not supported"),
    "response_format": (({"type": "text"},), "only {'type': 'text'} is supported; ask for JSON in the messages"),
    "modalities": ((["text"],), "this server answers in text only"),
    "audio": ((), "this server answers in text only"),
    "reasoning_effort": (("none",), "the served models have no reasoning effort to set"),
    "verbosity": (("medium",), "the served models have no verbosity to set"),
    "web_search_options": ((), "this server does not search the web"),
    "moderation": ((), "this server does not moderate"),
    "best_of": ((1,), "best_of is not supported; use n, logprobs, and pick the best answer yourself"),
    "suffix": (("",), "insertion before a suffix is not supported"),
}

_INT64 = 2**63


def _refusal(why: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{why}", {"why": why})


def _check_stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _refusal("must be a string or a list of strings")
    if len(stops) > MAX_STOPS or any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise _refusal(f"takes at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
    return stops


def _check_prompt(value: Any) -> list[str] | list[list[int]]:
    """One or several prompts, as texts or as token ids, always as a list of prompts."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise _refusal("must be a string, a list of strings, a list of token ids, or a list of such lists")
    if _are_ids(value) and value:
        value = [value]
    if not value or any(prompt in ("", []) for prompt in value):
        raise _refusal("is empty; give at least one character or token")
    if not all(isinstance(prompt, str) for prompt in value) and not all(_are_ids(prompt) for prompt in value):
        raise _refusal("must be all strings or all lists of token ids (integers)")
    return value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise _refusal("must be an object from token ids to numbers")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise _refusal(f"has the key {key[:40]!r}; keys are token ids")
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not -100 <= amount <= 100:
            raise _refusal(f"for token {key} must be a number from -100 to 100")
        bias[int(key)] = float(amount)
    return bias


_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPTS = [_TEXT, *({"type": "array", "minItems": 1, "items": items} for items in (_TEXT, _IDS["items"], _IDS))]
_STOP = {**_TEXT, "maxLength": MAX_STOP_CHARS}
_STOPS = [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]
_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,19}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}

# A field with a union type has one check with one message; pydantic would report every branch.
Stop = Annotated[Any, BeforeValidator(_check_stop), WithJsonSchema({"anyOf": _STOPS})]
Prompt = Annotated[Any, BeforeValidator(_check_prompt), WithJsonSchema({"anyOf": _PROMPTS})]
LogitBias = Annotated[Any, BeforeValidator(_check_logit_bias), WithJsonSchema(_BIASES)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, lt=_INT64)]
TokenCount = Annotated[int, Field(ge=0, lt=2**31)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class Body(BaseModel):
    """Base of all request bodies. Unknown fields are errors; ``http/body`` handles the two tables first."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str | None = Field(None, description="The served model's name; may be left out.")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = Field(None, description="End the stream with a chunk that carries usage.")
    include_obfuscation: bool | None = Field(None, description="Accepted and ignored.")


class TightwireOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    comm: bool = Field(False, description="Add what the ranks exchanged while this request ran.")
    timing: bool = Field(False, description="Add the parts of the time to the first token.")
    token_ids: bool = Field(False, description="Add the ids of the answer's tokens, with the token that ended it.")
    allreduce: str | None = Field(
        None,
        description="The AllReduce policy, one of --allreduce-extra; GET /comm lists them. Default: the server's.",
    )


class GenerationBody(Body):
    """The fields that completions and chat completions share."""

    text_param: ClassVar[str]  # the field with the prompt, for error messages

    max_tokens: TokenCount | None = Field(None, description="Most tokens of the answer.")
    n: int = Field(1, ge=1, le=MAX_N, description="Answers per prompt.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64, description="The same seed gives the same text.")
    temperature: float = Field(1.0, ge=0, le=2, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31, description="Extension. 0 or -1: all tokens.")
    min_p: float = Field(0.0, ge=0, le=1, description="Extension.")
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, description="Extension.")
    logit_bias: LogitBias = Field(default_factory=dict)
    stop: Stop = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=128, description="Extension.")
    include_stop_str_in_output: bool = Field(False, description="Extension: keep the stop string in the text.")
    min_tokens: TokenCount = Field(0, description="Extension: do not end before this many tokens.")
    ignore_eos: bool = Field(False, description="Extension: continue after the model's end token.")
    prompt_logprobs: NumLogprobs | None = Field(None, description="Extension, without stream.")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_SALT_CHARS,
        description="Extension: share cached prompt prefixes only with requests of the same salt.",
    )
    tightwire: TightwireOptions = TightwireOptions(comm=False, timing=False, token_ids=False, allreduce=None)

    def sampling_params(self, **decided: Any) -> SamplingParams:
        """The fields that ``SamplingParams`` has under the same name; ``decided`` replaces the client's values."""
        asked = {name: getattr(self, name) for name in SamplingParams.__struct_fields__ if name not in decided}
        return msgspec.convert(asked | decided, SamplingParams)


class CompletionBody(GenerationBody):
    text_param = "prompt"

    prompt: Prompt
    max_tokens: TokenCount | None = Field(16, description="Most tokens of the answer; 0 requires echo.")
    echo: bool = Field(False, description="Put the prompt before the answer.")
    logprobs: NumLogprobs | None = Field(None, description="The number of most likely tokens to list for each token.")
    add_special_tokens: bool = Field(True, description="Extension: let the tokenizer add its begin token.")


def _check_content(value: Any) -> str:
    """The text of a message; parts are joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _refusal("must be a string or a list of text parts")
    return "\n".join(_part_text(part) for part in value)


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if isinstance(kind, str) and kind != "text":
        raise _refusal(f"has a part of type {kind[:40]!r}; the model reads text only")
    raise _refusal('has a malformed part; a part is {"type": "text", "text": "..."}')


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENTS = [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]
Content = Annotated[Any, BeforeValidator(_check_content), WithJsonSchema({"anyOf": _CONTENTS})]


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    name: str | None = None
    tool_call_id: str | None = None

    def to_template(self) -> dict[str, Any]:
        """The form that chat templates read. ``developer``, OpenAI's newer name, becomes ``system``."""
        role = "system" if self.role == "developer" else self.role
        extras = {"name": self.name, "tool_call_id": self.tool_call_id}
        return {"role": role, "content": self.content} | {key: text for key, text in extras.items() if text is not None}


class ChatBody(GenerationBody):
    text_param = "messages"

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: TokenCount | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = Field(None, description="Requires logprobs: true.")


class TokenizeBody(Body):
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, description="In place of prompt.")
    add_special_tokens: bool = Field(True, description="Applies to prompt; a chat template has its own.")
    return_token_strs: bool = False


class DetokenizeBody(Body):
    tokens: list[TokenId] = Field(description="Token ids.")
