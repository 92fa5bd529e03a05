"""The messages between the HTTP processes of two hosts, each one line of JSON."""

import msgspec

from tightwire.comm.link.probe import PairFacts
from tightwire.comm.link.wire import LinkFacts
from tightwire.server.hosts.files import ModelFiles
from tightwire.server.ipc.messages import Failed, Heartbeat, Ready, Stage
from tightwire.server.plan.rank_setup import RunPlan


class _Message(msgspec.Struct, frozen=True, tag=True): ...


class Challenge(_Message):
    """Node 0's first message: a random number, for the proof that the node knows the shared secret."""

    nonce: str


class Welcome(_Message):
    """Node 0's answer to ``Hello``: the proof that it knows the secret too."""

    proof: str


class Hello(_Message):
    """A node's first message. ``facts``: what must be equal on all nodes; ``ports``: where it listens for the others."""

    node: int
    address: str
    interface: str
    ports: list[int]
    facts: dict[str, str]
    nonce: str = ""
    proof: str = ""


class Table(_Message):
    """Who has joined, in words."""

    text: str


class Probe(_Message):
    """All nodes have joined: connect to these addresses and ports, by node, and answer with ``Probed``."""

    targets: dict[int, tuple[str, list[int]]]


class Probed(_Message):
    failures: list[str]


class Measure(_Message):
    """Measure the network to these addresses and ports, by node, and answer with ``Measured``."""

    targets: dict[int, tuple[str, int]]


class Measured(_Message):
    pairs: list[PairFacts]
    failures: list[str]


class Network(_Message):
    """The network between all nodes: the same facts decide on every node."""

    link: LinkFacts


class WantModel(_Message):
    """The node has no copy of the model; node 0 answers with its ``ModelFiles``."""


class Offer(_Message):
    model: ModelFiles


class WantPiece(_Message):
    """Ask for the bytes of a file from ``offset`` on; node 0 answers with ``Piece``."""

    name: str
    offset: int


class Piece(_Message):
    data: bytes


class Opened(_Message):
    """The node has opened the model: its fingerprint, and the plan that the node's own memory allows."""

    facts: dict[str, str]
    plan: RunPlan


class Run(_Message):
    """The plan for the ranks of all nodes."""

    plan: RunPlan


class Report(_Message):
    """A message of one of the node's ranks."""

    message: Stage | Ready | Heartbeat | Failed


class Exited(_Message):
    """One of the node's ranks has ended; negative codes are signals."""

    rank: int
    code: int


class Serving(_Message):
    """All ranks of all nodes are ready."""


class Beat(_Message):
    """Shows that the sender is alive."""


class AskStop(_Message):
    """A signal asks this node to stop; node 0 lets running requests finish, and then ends all nodes."""


class End(_Message):
    """The sender ends: exit code 0 after a signal, 1 after a failure, 2 after a refusal."""

    code: int
    reason: str


FromHead = Challenge | Welcome | Table | Probe | Measure | Network | Offer | Piece | Run | Serving
FromMember = Hello | Probed | Measured | WantModel | WantPiece | Opened | Report | Exited | AskStop
Message = FromHead | FromMember | Beat | End
