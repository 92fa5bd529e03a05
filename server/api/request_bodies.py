"""Request bodies: the supported fields of OpenAI's API and of vLLM's sampling extensions, with their ranges.

A string is not accepted as a number; 4.0 is an integer, as in JSON. A top-level ``null`` means "not given".
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Field, ValidationInfo

from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.api.fields import Fields, refusal
from tightwire.server.api.structured import ResponseFormat, StructuredOutputs
from tightwire.server.api.tools import ToolCall, ToolChoice, Tools

MAX_STOPS = 16
MAX_STOP_CHARS = 1024

# Ignored with --strict-fields too: they label a request for billing, storage or routing and do not change an answer.
# ``prediction`` is a hint for speed.
IGNORED_FIELDS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    + ("prediction",)
)

# Fields of vLLM and llama.cpp that would change the answer.
UNSUPPORTED_EXTENSIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    **{f"guided_{kind}": ((), f"use structured_outputs.{kind}") for kind in ("json", "regex", "choice", "grammar")},
    "structural_tag": ((), "use tools, or structured_outputs.grammar"),
    "whitespace_pattern": ((), "JSON has one blank after : and , here"),
    "grammar": ((), "use structured_outputs.grammar, which takes GBNF"),
    "json_schema": ((), "use response_format"),
    "use_beam_search": ((False,), "use n, logprobs, and pick the best answer yourself"),
    "chat_template": ((), "serve --chat-template FILE sets another than the model's own"),
    "documents": (([],), "write documents into the messages"),
}

# Fields of OpenAI that are not supported: the values that are accepted because they have no effect, and advice.
UNSUPPORTED_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), "only chat completions have tools"),
    "tool_choice": (("none", "auto"), "only chat completions have tools"),
    "functions": (([],), "tools is the newer field with the same meaning"),
    "function_call": (("none", "auto"), "tool_choice is the newer field with the same meaning"),
    "modalities": ((["text"],), "this server answers in text only"),
    "audio": ((), "this server answers in text only"),
    "reasoning_effort": (("none",), "it is told to chat templates, so only chats have it"),
    "web_search_options": ((), "this server does not search the web"),
    "moderation": ((), "this server does not moderate"),
    "best_of": ((1,), "use n, logprobs, and pick the best answer yourself"),
    "suffix": (("",), "insertion before a suffix is not supported"),
    **UNSUPPORTED_EXTENSIONS,
}

PROGRESS = ("tightwire.progress", "progress")  # path and name, where it is ignored
_INT64 = 2**63


def _check_stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise refusal("must be a string or a list of strings")
    if len(stops) > MAX_STOPS or any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise refusal(f"takes at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
    return stops


def _check_prompt(value: Any) -> list[str] | list[list[int]]:
    """One or several prompts, as texts or as token ids, always as a list of prompts."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise refusal("must be a string, a list of strings, a list of token ids, or a list of such lists")
    if _are_ids(value) and value:
        value = [value]
    if not value or any(prompt in ("", []) for prompt in value):
        raise refusal("is empty; give at least one character or token")
    if not all(isinstance(prompt, str) for prompt in value) and not all(_are_ids(prompt) for prompt in value):
        raise refusal("must be all strings or all lists of token ids (integers)")
    return value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise refusal("must be an object from token ids to numbers")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise refusal(f"has the key {key[:40]!r}; keys are token ids")
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not -100 <= amount <= 100:
            raise refusal(f"for token {key} must be a number from -100 to 100")
        bias[int(key)] = float(amount)
    return bias


_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_Prompts = _Text | _Ids | Annotated[list[_Text] | list[_Ids], Field(min_length=1)]
_Stop = Annotated[_Text, Field(max_length=MAX_STOP_CHARS)]
_Stops = _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)]
_Biases = dict[Annotated[str, Field(pattern="^[0-9]{1,19}$")], Annotated[float, Field(ge=-100, le=100)]]

# A field with a union type has one check with one message; pydantic would report every branch.
Stop = Annotated[Any, BeforeValidator(_check_stop, json_schema_input_type=_Stops)]
Prompt = Annotated[Any, BeforeValidator(_check_prompt, json_schema_input_type=_Prompts)]
LogitBias = Annotated[Any, BeforeValidator(_check_logit_bias, json_schema_input_type=_Biases)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, lt=_INT64)]
TokenCount = Annotated[int, Field(ge=0, lt=2**31)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Body(Fields):
    # By name, at any depth: the values that are accepted because they have no effect, and advice for the others.
    unsupported: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = UNSUPPORTED_FIELDS

    model: str | None = Field(None, description="The served model's name; may be left out.")

    def ignored_values(self) -> Iterator[tuple[str, str]]:
        """Path and name of each value that is ignored although its field is known."""
        yield from ()


class StreamOptions(Fields):
    include_usage: bool | None = Field(None, description="End the stream with a chunk that carries usage.")
    continuous_usage_stats: bool | None = Field(None, description="Extension, with include_usage: usage in each chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted and ignored.")


class TightwireOptions(Fields):
    comm: bool = Field(False, description="Add what the ranks exchanged while this request ran.")
    timing: bool = Field(False, description="Add the parts of the time to the first token.")
    progress: bool = Field(
        False, description="With stream: until the first token, tell after each step how much of the prompt is done."
    )
    token_ids: bool = Field(False, description="Add the ids of the answer's tokens, with the token that ended it.")
    allreduce: str | None = Field(
        None, description="The AllReduce policy, as GET /comm lists them (--allreduce-extra). Default: the server's."
    )
    prefill: Literal["stages", "tensor"] | None = Field(
        None, description="With --layout hybrid: the prompt passes stages (default), or all ranks compute it together."
    )


class SamplingBody(Body):
    """The fields that every API which generates text has, OpenAI's and extensions."""

    stream: bool = False
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64, description="The same seed gives the same text.")
    temperature: float = Field(1.0, ge=0, le=2, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31, description="Extension. 0 or -1: all tokens.")
    min_p: float = Field(0.0, ge=0, le=1, description="Extension.")
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, description="Extension.")
    logit_bias: LogitBias = Field(default_factory=dict)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=128, description="Extension.")
    include_stop_str_in_output: bool = Field(False, description="Extension: keep the stop string in the text.")
    min_tokens: TokenCount = Field(0, description="Extension: do not end before this many tokens.")
    ignore_eos: bool = Field(False, description="Extension: continue after the model's end token.")
    allowed_token_ids: list[TokenId] | None = Field(
        None, min_length=1, description="Extension: generate only these, the model's end token only if it is listed."
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        default_factory=list, max_length=1024, description="Extension: texts that are not generated."
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="Extension: the form of the answer.")
    skip_special_tokens: bool = Field(True, description="Extension: leave special tokens out of the text.")
    return_tokens_as_token_ids: bool = Field(False, description="Extension: logprobs name a token token_id:ID.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Extension: share cached prefixes only with the same salt."
    )
    tightwire: TightwireOptions = Field(
        default_factory=lambda: TightwireOptions.model_construct(),
        description="allreduce and prefill: how the prompt is computed; timing (also of drafts), comm, progress, token_ids: what is told.",
    )

    def set_missing(self, values: Mapping[str, float]) -> None:
        for name in (values.keys() & type(self).model_fields.keys()) - self.model_fields_set:
            setattr(self, name, values[name])


class GenerationBody(SamplingBody):
    """The fields that completions and chat completions share."""

    text_param: ClassVar[str]  # the field with the prompt, for error messages
    default_tokens: ClassVar[int | None] = None  # an answer's limit without max_tokens; None: the model's

    max_tokens: TokenCount | None = Field(
        None,
        description="Most tokens of the answer. Default: the model's max_new_tokens, else what fits the context; in completions 16. 0 needs echo.",
    )
    n: int = Field(1, ge=1, le=128, description="Answers per prompt.")
    stream_options: StreamOptions | None = None
    stop: Stop = Field(default_factory=list)
    response_format: ResponseFormat | None = Field(None, description="Text, any JSON object, or JSON of a schema.")
    prompt_logprobs: NumLogprobs | None = Field(None, description="Extension, without stream.")
    return_token_ids: bool = Field(False, description="Extension, without stream: choices have token_ids.")

    def ignored_values(self) -> Iterator[tuple[str, str]]:
        if self.tightwire.progress and not self.stream:
            yield PROGRESS

    def sampling_params(self, **decided: Any) -> SamplingParams:
        """The fields that ``SamplingParams`` has under the same name; ``decided`` replaces the client's values."""
        asked = {name: getattr(self, name) for name in SamplingParams.__struct_fields__ if name not in decided}
        return msgspec.convert(asked | decided, SamplingParams)

    @property
    def may_call_tools(self) -> bool:
        """True if an answer is searched for tool calls."""
        return False

    @property
    def has_form(self) -> bool:
        """True if a grammar constrains the answer."""
        return self.response_format is not None or self.structured_outputs is not None

    @property
    def token_limit(self) -> int | None:
        """The most tokens of the answer that the client asked for."""
        return self.max_tokens

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """The number of most likely tokens to report for each token, or None without logprobs."""


class CompletionBody(GenerationBody):
    text_param = "prompt"
    default_tokens = 16  # OpenAI's

    prompt: Prompt
    echo: bool = Field(False, description="Put the prompt before the answer.")
    logprobs: NumLogprobs | None = Field(None, description="The number of most likely tokens to list for each token.")
    add_special_tokens: bool = Field(True, description="Extension: let the tokenizer add its begin token.")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class TextPart(Fields):
    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str | None = None


def text_parts(value: Any) -> Any:
    """A text as the list of parts that it stands for."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _check_content(value: Any, info: ValidationInfo) -> list[Any]:
    parts = text_parts(info.data.get("refusal") if value is None else value)
    if parts is None and info.data.get("tool_calls", True):  # True: they are wrong, which is said already
        return []
    if not isinstance(parts, list) or not parts:
        raise refusal("must be a string or a list of text parts; it may be missing beside tool_calls or a refusal")
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in ("text", "refusal"):
            raise refusal(f"has a part of type {kind[:40]!r}; the model reads text only")
        if not isinstance(kind, str) or not isinstance(part.get(kind), str):
            raise refusal('has a malformed part; a part is {"type": "text", "text": "..."}')
    return parts


Content = Annotated[list[TextPart], BeforeValidator(_check_content, json_schema_input_type=str | list[TextPart])]


class Message(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, description="Calls that the assistant made.")
    refusal: str | None = Field(None, description="The text of a message without content.")
    content: Content = Field(default=None, validate_default=True)  # pyright: ignore[reportAssignmentType]

    def to_template(self) -> dict[str, Any]:
        """The form that chat templates read. ``developer``, OpenAI's newer name, becomes ``system``."""
        role = "system" if self.role == "developer" else self.role
        text = "\n".join(part.text or part.refusal or "" for part in self.content)
        calls = [call.to_template() for call in self.tool_calls or ()] or None
        extras = {"name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": calls}
        return {"role": role, "content": text} | {key: value for key, value in extras.items() if value is not None}


class TemplateFields(Fields):
    """The fields that the chat template reads, beside messages and tools."""

    add_generation_prompt: bool | None = Field(
        None, description="Extension: end the prompt with the beginning of an answer. Default: unless it is continued."
    )
    continue_final_message: bool = Field(False, description="Extension: continue the text of the last message.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extension: variables of the chat template, such as enable_thinking."
    )
    reasoning_effort: Effort | None = Field(
        None, description="A variable of the chat template; enable_thinking is false with none, else true."
    )

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = self.reasoning_effort
        thinking = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return thinking | self.chat_template_kwargs

    @property
    def begins_message(self) -> bool:
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


class ChatBody(GenerationBody, TemplateFields):
    text_param = "messages"

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: TokenCount | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = Field(None, description="Requires logprobs: true.")
    tools: Tools = Field(default_factory=list, description="Functions that the model may call.")
    tool_choice: ToolChoice = Field(
        "auto",
        description="none, auto: the model decides, required: it calls one or more, one tool by name, or allowed_tools.",
    )
    parallel_tool_calls: bool = Field(True, description="False: an answer has one call at most.")

    @property
    def may_call_tools(self) -> bool:
        is_json = self.response_format is not None and self.response_format.type != "text"
        return self.demands_calls or bool(self.tools) and self.tool_choice != "none" and not is_json

    @property
    def demands_calls(self) -> bool:
        """True if the answer consists of tool calls."""
        return self.tool_choice not in ("none", "auto")

    @property
    def has_form(self) -> bool:
        return super().has_form or self.demands_calls

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(Body, TemplateFields):
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, description="In place of prompt.")
    tools: Tools = Field(default_factory=list, description="Beside messages.")
    add_special_tokens: bool = Field(True, description="Applies to prompt; a chat template has its own.")
    return_token_strs: bool = False


class DetokenizeBody(Body):
    tokens: list[TokenId] = Field(description="Token ids.")


class LoadAdapterBody(Body):
    lora_name: str = Field(description="The model name that requests choose the adapter by.")
    lora_path: str = Field(min_length=1, description="A folder inside --lora-dir, absolute or relative to it.")
    load_inplace: bool = Field(False, description="Replace an adapter of this name; requests that run finish with it.")


class UnloadAdapterBody(Body):
    lora_name: str = Field(description="The adapter's model name.")
    lora_int_id: int | None = Field(None, description="Accepted for vLLM's clients, and not needed.")
