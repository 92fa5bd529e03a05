"""Response bodies in OpenAI's shapes. msgspec structs: one is encoded per token, and they are the schemas of the docs.

``UNSET`` fields are left out of the JSON; ``None`` is written as null where OpenAI writes it.
"""

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from tightwire.comm.link.wire import LinkFacts
from tightwire.server.ipc.engine_stats import ReplicaLoad
from tightwire.server.ipc.messages import CommChoice, SelfTestVerdict


class PromptTokensDetails(Struct, frozen=True):
    """``cached_tokens``: found in the prefix cache, so not computed for this request."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """A prompt is counted once, however many answers it got."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CommTotals(Struct, frozen=True):
    """Collectives of one kind on rank 0. ``exact_bytes``: what they would have sent with nothing quantized;
    ``message_bytes``: of the tensors given to them; ``seconds`` includes waiting for slower ranks, and
    ``codec_seconds`` of them were spent encoding and decoding (null: inside a fused kernel, not known).
    """

    op: str
    algorithm: str
    phase: str
    calls: int
    bytes_sent: int
    exact_bytes: int
    seconds: float
    message_bytes: int
    codec_seconds: float | None


class CommSpan(Struct, frozen=True):
    """A stretch of the request's life: how long it was, and how much of it rank 0 spent in collectives."""

    seconds: float
    comm_seconds: float
    comm_share: float


class CommReport(Struct, frozen=True):
    """What rank 0 exchanged in the steps this request lived through.

    ``bytes_sent`` and ``exact_bytes`` (what the same collectives would have sent with nothing quantized) are the sums
    over ``counters``, ``saved_bytes`` is their difference. ``shared`` is always true: a step serves all running
    requests at once, so others' tokens are in these numbers too.
    """

    ttft: CommSpan
    decode: CommSpan
    bytes_sent: int
    exact_bytes: int
    saved_bytes: int
    counters: list[CommTotals]
    shared: bool = True


class Timing(Struct, frozen=True):
    """Where the time to the first token went, inside the server; the parts add up to ``ttft_s``.

    It begins when the request's headers have come and ends when the first text is handed to the socket (text that may
    be the beginning of a stop string waits for more tokens); of an answer that is not streamed, when its first token is
    with the HTTP process. Of several sequences the first counts. ``http_s``: the body read and checked.
    ``queue_s``: from the HTTP process to the first step that has the sequence. From there to the first token, whatever
    other sequences the steps were for: ``compute_s``, forward passes without their collectives; ``allreduce_s``,
    collectives on rank 0, waiting for slower ranks included; ``codec_s``, encoding and decoding for them (null: in a
    fused kernel, so part of ``allreduce_s``); ``sampling_s``; ``engine_s``, all else. ``send_s``: from rank 0's token to
    the end. Times are the host's: on CUDA, where work is only enqueued, ``sampling_s`` waits for the device.
    """

    ttft_s: float
    http_s: float
    tokenize_s: float
    queue_s: float
    compute_s: float
    allreduce_s: float
    codec_s: float | None
    sampling_s: float
    engine_s: float
    send_s: float


class TightwireExtra(Struct, frozen=True):
    """What of it was asked for. ``timing`` is null where there was no first token; ``token_ids`` are by choice."""

    comm: CommReport | UnsetType = UNSET
    timing: Timing | UnsetType | None = UNSET
    token_ids: list[list[int]] | UnsetType = UNSET


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


class CommCost(Struct, frozen=True):
    """Collectives of one kind on rank 0 since start: totals as in CommTotals, and what one of them took.

    ``p50_us`` and ``p99_us`` are of the newest 512 at most; null until they are known.
    ``algbw_gb_per_s``: gigabytes of message a second, null where no time was taken. On CUDA times are those to enqueue.
    """

    op: str
    algorithm: str
    phase: str
    calls: int
    bytes_sent: int
    exact_bytes: int
    seconds: float
    message_bytes: int
    codec_seconds: float | None
    mean_us: float | None
    p50_us: float | None
    p99_us: float | None
    algbw_gb_per_s: float | None


class CommPolicy(Struct):
    """How the ranks sum their parts and why, and what rank 0 has exchanged since start.

    ``transport_reason``: why ``--transport auto`` came to a slower one than this device's best; empty when it did not.
    ``tp`` ranks sum; there are ``dp`` such groups, each a replica of the model, whose logits go to rank 0.
    ``replicas``: what each of several has to do now.
    ``overlap``: whether one half of a prompt's step is computed while the other half is summed.
    ``choices``: the policy in force, the first line of a site, phase and layer (``layers`` null: any) whose
    ``up_to_bytes`` the message does not exceed. ``extra``: the same of the policies that a request may ask for by name.
    ``link``: the emulated wire between the nodes, of ``serve --link``. ``self_test``: what the check at start-up found;
    an algorithm that is not ``ok`` is never used.
    ``saved_bytes``: what quantizing kept off the wire, ``exact_bytes`` less ``bytes_sent``.
    """

    algorithm: str
    transport: str
    transport_reason: str
    tp: int
    dp: int
    replicas: list[ReplicaLoad]
    num_nodes: int
    overlap: bool
    choices: list[CommChoice]
    extra: dict[str, list[CommChoice]]
    self_test: list[SelfTestVerdict]
    link: LinkFacts | None
    num_steps: int
    bytes_sent: int
    exact_bytes: int
    saved_bytes: int
    counters: list[CommCost]


class ChromeTrace(Struct):
    """Every collective of every rank, as https://ui.perfetto.dev opens it; times in us, on CUDA those to enqueue."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: str
    otherData: dict[str, Any]
