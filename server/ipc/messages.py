"""The messages between the HTTP process and the rank processes: msgspec structs over zmq, without pickle.

HTTP process -> rank 0 (``ToEngine``), every rank -> HTTP process (``FromRank``), rank 0 -> other ranks (``ToFollower``),
HTTP process -> every rank's reporter, which answers even while the rank computes or hangs (``ToReporter``).
"""

import msgspec

from tightwire.comm.all_reduce.entry import SelfTestVerdict
from tightwire.comm.ledger.ledger import Latency
from tightwire.comm.ledger.recording import Event
from tightwire.comm.link.wire import LinkFacts
from tightwire.model.sampling.parameters import SamplingParams, TokenScore
from tightwire.model.step import StepPlan
from tightwire.server.ipc.engine_stats import EngineStats


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """One sequence to continue. ``id`` is unique among the server's live requests."""

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    allreduce: str | None = None  # AllReduce policy by name; None: the server's own
    cache_salt: str = ""  # shares cached prefixes only with requests of the same salt
    adapter: int = 0  # id of the LoRA adapter; 0: none
    progress: bool = False  # send ``PromptProgress`` after each step that computes a part of the prompt


class CancelRequest(msgspec.Struct, frozen=True, tag=True):
    """End these requests at the next step; unknown ids are ignored. Each request sends a last ``Output``."""

    ids: list[str]


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load a LoRA adapter on every rank. Each rank answers ``AdapterLoaded``. ``id`` is never used twice."""

    id: int
    folder: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Take no more requests for this adapter; those that run finish with it."""

    id: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop and exit 0."""


class StopFollowing(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``Stop`` for a follower, in the array form of ``StepPlan`` because a union cannot mix the two forms."""


class LoadSlot(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``LoadAdapter`` for a follower, with the slot that rank 0 chose."""

    id: int
    slot: int
    folder: str


class Record(msgspec.Struct, frozen=True, tag=True):
    """Record every collective for ``seconds`` and send them as ``Recorded``. Replaces a running recording."""

    id: int
    seconds: float


class Hush(msgspec.Struct, frozen=True, tag=True):
    """From a process to its own reporter: stop the heartbeat."""


ToEngine = AddRequest | CancelRequest | LoadAdapter | UnloadAdapter | Stop


class Banned(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Follows a plan with masked rows, once rank 0 has the masks: a bit for each token, for each of these rows."""

    bits: bytes


ToFollower = StepPlan | Banned | LoadSlot | StopFollowing
ToReporter = Record | Hush


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """Where rank 0 spent the time to a sequence's first token; moments are ``time.monotonic`` readings of this host.

    ``codec_s``: None in a fused kernel, and then part of ``allreduce_s``. The rest is the engine's own work.
    """

    scheduled_s: float  # its first step began
    sampled_s: float
    compute_s: float  # forward passes without collectives
    allreduce_s: float  # collectives and waiting for slower ranks, without ``codec_s``
    codec_s: float | None
    sampling_s: float


class PromptProgress(msgspec.Struct, frozen=True):
    """How much of a prompt is in the KV cache after a step: ``cached`` + ``computed`` of ``prompt_tokens``.

    ``cached``: tokens found in the prefix cache. ``computed``: tokens that this request's steps computed. ``seconds``: since its
    first step began. The numbers never fall, even if the sequence is preempted and computes a part again.
    """

    prompt_tokens: int
    cached: int
    computed: int
    seconds: float


class Output(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """New tokens of one request, or only ``progress``. The last output of a request has ``finish_reason``.

    ``finish_reason``: ``stop`` (``stop_token_id`` is the stop token, the last of ``token_ids``), ``length``,
    ``cancelled``, ``error`` or ``refused``, for a request that cannot be answered (see ``message``).
    ``prompt_logprobs`` comes once, with the first token; entry 0 is None.
    """

    id: str
    token_ids: list[int]
    logprobs: list[TokenScore] | None = None
    prompt_logprobs: list[TokenScore | None] | None = None
    finish_reason: str | None = None
    stop_token_id: int | None = None
    message: str | None = None
    queue_s: float | None = None  # with the first token: from arrival at the engine to the first step
    first_token: FirstToken | None = None  # with the first token
    num_cached_tokens: int = 0  # with the first token: prompt tokens found in the prefix cache
    num_drafted: int = 0  # tokens that were guessed for this step, and how many of them were right
    num_right: int = 0
    progress: PromptProgress | None = None  # before the first token, if asked for


class StepResult(msgspec.Struct, frozen=True, tag=True):
    """The result of one engine step. ``outputs`` may be empty (a prefill chunk); ``stats`` is current."""

    outputs: list[Output]
    stats: EngineStats


class Stage(msgspec.Struct, frozen=True, tag=True):
    rank: int
    name: str
    fraction: float


class CommChoice(msgspec.Struct, frozen=True):
    """One line of the policy in use: messages of a site and phase, up to a size, and their algorithm."""

    site: str  # embed, o_proj or down_proj
    phase: str  # prefill or decode; embed: any
    up_to_bytes: int | None  # the largest message of this line; None: any size
    algorithm: str
    reason: str
    layers: list[int] | None = None  # None: all


class CommSetup(msgspec.Struct, frozen=True):
    """The transport, policies and self-test results; the same on every rank. Empty lists for a single rank."""

    transport: str  # shared-memory, sockets, process-group, peer-memory, or none for a single rank
    num_nodes: int
    transport_reason: str = ""  # why ``auto`` chose a slower transport; empty if it did not
    overlap: bool = False  # compute one half of a prompt while the other half is summed
    choices: list[CommChoice] = []
    self_test: list[SelfTestVerdict] = []
    link: LinkFacts | None = None  # the emulated wire between the nodes
    extra: dict[str, list[CommChoice]] = {}  # the policies that a request may ask for by name


class Ready(msgspec.Struct, frozen=True, tag=True):
    """This rank has loaded and warmed up. The fields are for the log."""

    rank: int
    peak_host_bytes: int
    comm: CommSetup | None = None
    cores: tuple[int, ...] = ()  # the cores it is bound to; empty: none
    numa_nodes: tuple[int, ...] = ()  # the nodes its memory comes from; empty: any
    note: str = ""  # what its runner measured of its kernels


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent about twice a second by the reporter's thread. ``doing``: the stage or step, and the newest collective."""

    rank: int
    step: int
    doing: str
    busy_s: float  # seconds since ``doing`` began; 0 when idle
    num_collectives: int = 0  # begun since start; the rank of a replica with the lowest count is behind
    num_choice_gathers: int = 0  # begun since start; the others wait for ranks with fewer
    num_fetched: int = 0  # grows while weights, or keys and values, arrive
    latencies: list[Latency] = []


class Recorded(msgspec.Struct, frozen=True, tag=True):
    """Collectives of one rank in order, for the ``Record`` with that id; more follow unless ``last``."""

    rank: int
    id: int
    row: int  # the ledger that they come from
    events: list[Event]
    clock: str  # the clock of their times (``comm.ledger.recording.clock_name``)
    last: bool


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """One rank's answer to ``LoadAdapter``. ``refusal``: why it did not load the adapter; empty: it did, from files of this digest."""

    rank: int
    id: int
    refusal: str = ""
    digest: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This rank cannot continue, and exits. ``symptom``: another rank caused it. ``traceback``: empty if not needed."""

    rank: int
    doing: str
    message: str
    traceback: str
    symptom: bool = False


FromRank = StepResult | Stage | Ready | Heartbeat | Recorded | AdapterLoaded | Failed
