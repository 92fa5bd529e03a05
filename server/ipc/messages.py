"""The messages between the HTTP process and the rank processes: msgspec structs over zmq, nothing pickled.

Channels, all local to one server: HTTP process -> rank 0 (``ToEngine``), every rank -> HTTP process (``FromRank``),
rank 0 -> ranks 1.. (``ToFollower``), HTTP process -> every rank's reporter, which answers while the rank computes or
hangs (``ToReporter``).
"""

import msgspec

from tightwire.comm.ledger.ledger import Event, Latency
from tightwire.comm.link.wire import LinkFacts
from tightwire.comm.sizes import format_bytes
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.step import StepPlan
from tightwire.server.ipc.engine_stats import EngineStats


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """One sequence to continue. ``id`` is unique among the live requests of this server."""

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    allreduce: str | None = None  # the arm that sums its steps; None: the server's own
    cache_salt: str = ""  # shares cached prefixes with requests of the same salt alone


class CancelRequest(msgspec.Struct, frozen=True, tag=True):
    """Stop these at the next step and free their blocks; unknown ids are ignored. Their last ``Output`` still comes."""

    ids: list[str]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop and exit 0."""


class StopFollowing(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``Stop`` for a follower, in the array form of ``StepPlan``, because a union cannot mix the two forms."""


class Record(msgspec.Struct, frozen=True, tag=True):
    """Record every collective for so long and send them as ``Recorded``; ends a recording that is under way."""

    id: int
    seconds: float


class Hush(msgspec.Struct, frozen=True, tag=True):
    """To a reporter by its own process: no more heartbeats."""


ToEngine = AddRequest | CancelRequest | Stop
ToFollower = StepPlan | StopFollowing
ToReporter = Record | Hush


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of one token, and the most likely ones at its place, best first.

    ``rank`` is the chosen token's place in that order, from 1; logprobs are of the unmodified distribution (before
    temperature and penalties), as vLLM reports them by default.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """How rank 0 came to a sequence's first token, between two moments on the clock of ``time.monotonic``.

    The processes of a server are on one host, so the HTTP process reads the same clock. ``codec_s`` None: in a fused
    kernel, so part of ``allreduce_s``. What is missing between the two moments is the engine's own work.
    """

    scheduled_s: float  # when its first step began
    sampled_s: float
    compute_s: float  # forward passes without their collectives
    allreduce_s: float  # collectives, waiting for slower ranks included, without ``codec_s``
    codec_s: float | None
    sampling_s: float


class Output(msgspec.Struct, frozen=True, tag=True):
    """New tokens of one request. The last one of a request has ``finish_reason``; nothing follows it.

    ``finish_reason``: ``stop`` (stop token; ``stop_token_id`` says which, and it is the last of ``token_ids``),
    ``length``, ``cancelled`` or ``error`` (``message`` says what). ``prompt_logprobs`` comes once, with the first
    token: entry 0 is None (nothing precedes it).
    """

    id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_token_id: int | None = None
    message: str | None = None
    queue_s: float | None = None  # with the first token: from arrival at the engine to the first scheduled step
    first_token: FirstToken | None = None  # with the first token
    num_cached_tokens: int = 0  # with the first token: of the prompt, found in the prefix cache


class StepResult(msgspec.Struct, frozen=True, tag=True):
    """What one engine step brought; ``outputs`` may be empty (a prefill chunk), ``stats`` is current."""

    outputs: list[Output]
    stats: EngineStats


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Start-up progress of one rank. ``fraction`` of this stage, 0 to 1; ``seconds`` is set when it is done."""

    rank: int
    name: str
    fraction: float
    seconds: float | None = None


class CommChoice(msgspec.Struct, frozen=True):
    """One line of the policy in force: messages of a site and phase, up to a size, and how they are summed."""

    site: str  # embed, o_proj or down_proj
    phase: str  # prefill or decode: what kind of rows; embed: any
    up_to_bytes: int | None  # the largest message this line is for; None: any
    algorithm: str
    reason: str
    layers: list[int] | None = None  # None: all


class SelfTestVerdict(msgspec.Struct, frozen=True):
    """What the check at start-up found of one algorithm that the policy may use."""

    algorithm: str
    ok: bool
    detail: str  # the sizes checked, or what was wrong


class CommSetup(msgspec.Struct, frozen=True):
    """How ranks meet; the same on every rank. With one rank there is nothing to choose or check."""

    transport: str  # shared-memory, process-group, peer-memory, or none for a single rank
    num_nodes: int
    transport_reason: str = ""  # why ``auto`` took a slower one than it would have liked
    overlap: bool = False  # one half of a prompt is computed while the other is summed
    choices: list[CommChoice] = []
    self_test: list[SelfTestVerdict] = []
    link: LinkFacts | None = None  # the emulated wire between the nodes
    extra: dict[str, list[CommChoice]] = {}  # the same for the policies that a request may ask for by name


class StreamForecast(msgspec.Struct, frozen=True):
    """What streaming layers comes to on this rank, from what it took while warming up; computing is without waiting.

    What could not be measured is 0.
    """

    num_layers: int  # that stream
    pass_bytes: int  # that come in for every step
    bytes_per_s: float
    pass_s: float  # their way
    decode_s: float  # computing one generated token
    prompt_s: float  # computing a prompt of 512 tokens, as long as those of a short one
    break_even_rows: int  # prompt tokens whose computing takes as long as the layers' way

    def describe(self) -> str:
        """In a line, for people."""
        token_s, first_s = _longest(self.pass_s, self.decode_s), _longest(self.pass_s, self.prompt_s)
        rows = f"about {self.break_even_rows}" if first_s else "an unknown number of"
        return (
            f"streaming: {format_bytes(self.pass_bytes)} a step came at {self.bytes_per_s / 1e6:.0f} MB/s while warming up; "
            f"one sequence alone gets {_known(token_s and 1 / token_s)} tokens/s (resident: "
            f"{_known(self.decode_s and 1 / self.decode_s)}), the first token behind 512 prompt tokens takes "
            f"{_known(first_s)} s (resident: {_known(self.prompt_s)}); from {rows} prompt tokens a step on, computing takes "
            "longer than the layers' way"
        )


def _longest(*times_s: float) -> float:
    """0 unless all are known."""
    return max(times_s) if all(times_s) else 0.0


def _known(value: float) -> str:
    return f"about {value:.3g}" if value else "unknown"


class Ready(msgspec.Struct, frozen=True, tag=True):
    """This rank has loaded, warmed up, and would answer; what it holds, for the log."""

    rank: int
    weight_bytes: int
    peak_host_bytes: int
    comm: CommSetup | None = None
    cores: tuple[int, ...] = ()  # that it keeps to; none: it runs where the kernel puts it
    stream: StreamForecast | None = None  # rank 0: where layers stream


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent about twice a second from a thread of its own.

    ``doing`` names the stage or step, and the collective that runs now or ended last.
    """

    rank: int
    step: int
    doing: str
    busy_s: float  # how long it has been doing it; 0 when idle
    num_collectives: int = 0  # begun since start; a replica's ranks run the same ones, so who has the fewest is behind
    num_meetings: int = 0  # of all replicas' ranks, begun since start; those with fewer are waited for
    num_fetched: int = 0  # grows while layers' weights, or keys and values, come in
    latencies: list[Latency] = []


class Recorded(msgspec.Struct, frozen=True, tag=True):
    """Collectives of one rank in order, for the ``Record`` of that id; more follow until ``last``."""

    rank: int
    id: int
    events: list[Event]
    clock: str  # which clock their times are on (``comm.trace.clock_name``)
    last: bool


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This rank cannot go on; it exits after sending this.

    ``symptom``: it failed for want of another rank, whose own report says more. ``traceback``: empty where the message is
    for the user, of an option that turned out not to be possible.
    """

    rank: int
    doing: str
    message: str
    traceback: str
    symptom: bool = False


FromRank = StepResult | Stage | Ready | Heartbeat | Recorded | Failed
