"""Response bodies of all dialects, as msgspec structs: usage, models, tokens, health, /comm and collectives' traces."""

from datetime import UTC, datetime
from typing import Any, Self

from msgspec import UNSET, Struct, UnsetType

from tightwire.model.text.tokenizer import TOKENIZER_CLASS, Tokenizer
from tightwire.server.api.serving import ModelInfo
from tightwire.server.api.trace import CommTotals
from tightwire.server.ipc.engine_stats import DraftReport, ReplicaLoad
from tightwire.server.ipc.messages import CommSetup


class PromptTokensDetails(Struct, frozen=True):
    """``cached_tokens``: found in the prefix cache and not computed for this request."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """A prompt is counted once, however many answers it got."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ModelCard(Struct, tag_field="type", tag="model"):
    """For OpenAI's clients (``object``, ``created``, ``owned_by``), vLLM's (``root``, ``parent``, ``max_model_len``) and Anthropic's."""

    id: str
    display_name: str
    created: int
    created_at: datetime
    max_model_len: int
    root: str
    parent: str | None  # of a LoRA adapter: the base model
    object: str = "model"
    owned_by: str = "tightwire"
    lifecycle: str = "active"

    @classmethod
    def of(cls, info: ModelInfo, name: str) -> Self:
        """The card of the model or of an adapter. Raises ApiError 404 if there is none of this name."""
        adapter = info.adapter(name)
        created, root = (adapter.created, adapter.folder) if adapter else (info.created, info.root)
        made, parent = datetime.fromtimestamp(created, UTC), info.name if adapter else None
        return cls(name, name, created, made, info.plan.max_model_len, root, parent)


class ModelDeleted(Struct):
    """A LoRA adapter that was unloaded."""

    id: str
    object: str = "model"
    deleted: bool = True


class ModelList(Struct):
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool = False
    object: str = "list"


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(Struct):
    """The fields of tokenizer_config.json that clients read who tokenize and render on this server; null where there is none."""

    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    chat_template: str | None
    tokenizer_class: str = TOKENIZER_CLASS

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        tokens = (tokenizer.special_tokens.get(f"{kind}_token") for kind in ("eos", "bos", "pad"))
        return cls(*tokens, chat_template=tokenizer.chat_template)


class Version(Struct):
    version: str


class Detokenized(Struct):
    prompt: str


class Health(Struct):
    """``status``: live, ready, loading, draining or dead. ``reason``: what is loading, why the engine died, or on
    another node than 0 where to send requests.

    ``kernels``: the level of the CPU kernels, such as v4-bf16 (spec: torch's reference); empty on a GPU and before ready.
    ``activations``: inputs of products with packed weights, float or int8; empty before ready. ``adapters``: the
    loaded LoRA adapters, if there are any.
    """

    status: str
    reason: str = ""
    kernels: str = ""
    activations: str = ""
    adapters: list[str] | UnsetType = UNSET


class Home(Struct, frozen=True):
    """What this server is. ``model``: null while it loads."""

    name: str
    about: str
    model: str | None
    status: str
    links: dict[str, str]
    example: str


class CommCost(CommTotals, frozen=True, kw_only=True):
    """Collectives of one kind on rank 0 since start: totals as in CommTotals, and the time of one collective.

    ``p50_us`` and ``p99_us`` are of the newest 512 at most; null until they are known. ``algbw_gb_per_s``: gigabytes of
    message per second; null without a measured time. On CUDA all times are those to enqueue.
    """

    mean_us: float | None
    p50_us: float | None
    p99_us: float | None
    algbw_gb_per_s: float | None


class CommPolicy(CommSetup, frozen=True, kw_only=True):
    """The AllReduce policies of this server with their reasons, and what rank 0 has exchanged since start.

    ``sum_dtype``: the number format of partial sums in messages. ``layout``: what crosses the wire, and why if it was chosen.
    ``transport_reason``: why ``--transport auto`` chose a slower transport than this device's best; otherwise empty. ``tp`` ranks form one of ``dp`` replicas of the model.
    ``replicas``: the load of each, if there are several. ``drafts``: since start, of ``--speculation``. ``overlap``: half of a prompt's step is computed while the other
    half is summed. ``choices``: the default policy; the first line counts whose site, phase and layer match (``layers``
    null: any) and whose ``up_to_bytes`` is not exceeded. ``extra``: the policies that a request may choose by name.
    ``link``: the link that ``serve --link`` emulates. ``self_test``: an algorithm that is not ``ok`` is never used.
    """

    algorithm: str
    sum_dtype: str
    layout: str
    tp: int
    dp: int
    replicas: list[ReplicaLoad]
    num_steps: int
    drafts: DraftReport
    bytes_sent: int
    exact_bytes: int
    saved_bytes: int
    counters: list[CommCost]


class ChromeTrace(Struct):
    """Every collective of every rank, for https://ui.perfetto.dev. Times in us; on CUDA those to enqueue."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: str
    otherData: dict[str, Any]
