"""Response bodies in OpenAI's shapes. msgspec structs: one is encoded per token, and they are the schemas of the docs.

``UNSET`` fields are left out of the JSON; ``None`` is written as null where OpenAI writes it.
"""

from msgspec import UNSET, Struct, UnsetType


class Usage(Struct, frozen=True):
    """A prompt is counted once, however many answers it got."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CommTotals(Struct, frozen=True):
    op: str
    algorithm: str
    phase: str
    calls: int
    bytes_sent: int
    exact_bytes: int  # what the same collectives would have sent unquantized
    seconds: float
    message_bytes: int  # of the tensors given to them


class CommSpan(Struct, frozen=True):
    """A stretch of the request's life: how long it was, and how much of it rank 0 spent in collectives."""

    seconds: float
    comm_seconds: float
    comm_share: float


class CommReport(Struct, frozen=True):
    """What rank 0 exchanged in the steps this request lived through.

    ``shared`` is always true: a step serves all running requests at once, so others' tokens are in these numbers too.
    """

    ttft: CommSpan
    decode: CommSpan
    bytes_sent: int
    exact_bytes: int
    counters: list[CommTotals]
    shared: bool = True


class TightwireExtra(Struct, frozen=True):
    comm: CommReport


class PromptLogprob(Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """The whole answer, and each chunk of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    tightwire: TightwireExtra | UnsetType = UNSET


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    tightwire: TightwireExtra | UnsetType = UNSET


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    tightwire: TightwireExtra | UnsetType = UNSET


class ModelCard(Struct):
    id: str
    created: int
    max_model_len: int
    root: str
    object: str = "model"
    owned_by: str = "tightwire"


class ModelList(Struct):
    data: list[ModelCard]
    object: str = "list"


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct):
    prompt: str


class Health(Struct):
    """``status``: live, ready, loading, draining or dead; ``reason`` says what is loading or why it died."""

    status: str
    reason: str = ""


class CommPolicy(Struct):
    """Which algorithm sums the ranks' parts, and what rank 0 has exchanged since start."""

    algorithm: str
    transport: str
    tp: int
    num_steps: int
    counters: list[CommTotals]
