"""The messages between the HTTP processes of two hosts, each one line of JSON."""

import msgspec

from tightwire.comm.link.probe import PairFacts
from tightwire.comm.link.wire import LinkFacts
from tightwire.server.hosts.files import ModelFiles
from tightwire.server.ipc.messages import AdapterLoaded, Failed, Heartbeat, Ready, Stage
from tightwire.server.plan.rank_setup import LayoutChoice, RunPlan


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """Node 0's first message: a random number, for the proof that the node knows the shared secret."""

    nonce: str


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Node 0's answer to ``Hello``: the proof that it knows the secret too."""

    proof: str


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A node's first message. ``facts``: what must be equal on all nodes; ``ports``: where it listens for the others."""

    node: int
    address: str
    interface: str
    ports: list[int]
    facts: dict[str, str]
    memory_bytes: int  # that the node has free
    nonce: str = ""
    proof: str = ""


class Table(msgspec.Struct, frozen=True, tag=True):
    """Who has joined, in words."""

    text: str


class Probe(msgspec.Struct, frozen=True, tag=True):
    """All nodes have joined: connect to these addresses and ports, by node, and answer with ``Probed``."""

    targets: dict[int, tuple[str, list[int]]]


class Probed(msgspec.Struct, frozen=True, tag=True):
    failures: list[str]


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Measure the network to these addresses and ports, by node, and answer with ``Measured``."""

    targets: dict[int, tuple[str, int]]


class Measured(msgspec.Struct, frozen=True, tag=True):
    pairs: list[PairFacts]
    failures: list[str]


class Network(msgspec.Struct, frozen=True, tag=True):
    """The network between all nodes: the same facts decide on every node."""

    link: LinkFacts


class WantModel(msgspec.Struct, frozen=True, tag=True):
    """The node has no copy of the model; node 0 answers with its ``ModelFiles``."""


class WantPiece(msgspec.Struct, frozen=True, tag=True):
    """Ask for the bytes of a file from ``offset`` on; node 0 answers with ``Piece``."""

    name: str
    offset: int


class Piece(msgspec.Struct, frozen=True, tag=True):
    data: bytes


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The node has opened the model: its fingerprint, and the plan that the node's own memory allows."""

    facts: dict[str, str]
    plan: RunPlan


class Run(msgspec.Struct, frozen=True, tag=True):
    plan: RunPlan


class Report(msgspec.Struct, frozen=True, tag=True):
    message: Stage | Ready | Heartbeat | AdapterLoaded | Failed


class Exited(msgspec.Struct, frozen=True, tag=True):
    """One of the node's ranks has ended; negative codes are signals."""

    rank: int
    code: int


class Serving(msgspec.Struct, frozen=True, tag=True):
    """All ranks of all nodes are ready."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Shows that the sender is alive."""


class AskStop(msgspec.Struct, frozen=True, tag=True):
    """A signal asks this node to stop; node 0 lets running requests finish, and then ends all nodes."""


class End(msgspec.Struct, frozen=True, tag=True):
    """The sender ends: exit code 0 after a signal, 1 after a failure, 2 after a refusal."""

    code: int
    reason: str


FromHead = Challenge | Welcome | Table | Probe | Measure | Network | LayoutChoice | ModelFiles | Piece | Run | Serving
FromMember = Hello | Probed | Measured | WantModel | WantPiece | Opened | Report | Exited | AskStop
Message = FromHead | FromMember | Beat | End
