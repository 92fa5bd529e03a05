"""The lines of JSON that the processes of ranks read: the identities of a host's ranks, then for each rank its work."""

import time

import msgspec

from tightwire.comm.link.emulated_network import EmulatedNode
from tightwire.comm.link.link import Link
from tightwire.comm.link.wire import LinkFacts
from tightwire.comm.policy.rules import Policy
from tightwire.model.stages import StagePlan
from tightwire.model.weights import EVERYTHING_RESIDENT, WeightPlan
from tightwire.server.config.serve import ServeConfig


class RankIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's place, and the addresses it needs for reporting."""

    rank: int
    world_size: int
    parent_pid: int
    to_parent: str  # zmq address of the parent's inbox, shared by all ranks
    inboxes: tuple[str, ...]  # zmq address of each rank's inbox; rank 0 sends plans to the others'
    reporter: str  # zmq address where this rank's reporter listens to the parent
    work_fd: int  # the pipe with its work, which ends when the parent does
    store_port: int  # of the rendezvous store
    store_fd: int | None  # rank 0 only: the socket already listening on that port
    segment_fd: int | None = None  # memory shared by all ranks; None: unavailable
    node_segment_fd: int | None = None  # memory shared by the ranks of this node, if there are several nodes
    replica_segment_fd: int | None = None  # memory shared by the ranks of this replica or stage, if there are several
    peer_segment_fd: int | None = None  # memory shared by the ranks of this node that hold the same weights
    local_rank: int = 0  # its number among the ranks of this host
    num_local: int = 1
    store_host: str = "127.0.0.1"  # the store's address
    socket_port: int = 0  # where it accepts other ranks' sockets; 0: any free port
    node: EmulatedNode | None = None  # the network namespace that it enters; None: its host's own
    throttle: Link | None = None  # rate limit on this rank's messages between nodes

    @property
    def interface(self) -> str | None:
        """Towards the other nodes, if each node is a network namespace."""
        return None if self.node is None else self.node.interface

    @property
    def fds(self) -> set[int]:
        """The file descriptors that this rank gets from its parent."""
        segments = self.segment_fd, self.node_segment_fd, self.replica_segment_fd, self.peer_segment_fd
        return {fd for fd in (self.work_fd, self.store_fd, *segments) if fd is not None}


class RanksToFork(msgspec.Struct, frozen=True):
    """The ranks of a host, and the pipe through which their parent is told the ids of their processes, in order."""

    identities: tuple[RankIdentity, ...]
    ids_fd: int


class NamedPolicy(msgspec.Struct, frozen=True):
    """A policy that requests may ask for by name."""

    name: str
    policy: Policy
    library_policy: Policy | None = None  # used if peer memory is unavailable; None: refuse to start


class ServedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a LoRA adapter. ``digest``: a digest of its files, for the fingerprint of answers."""

    id: int
    name: str
    folder: str
    digest: str
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    @property
    def slot(self) -> int:
        """The slot of an adapter that every rank loads at start."""
        return self.id - 1


class AdapterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The slots for LoRA adapters on every rank."""

    num_slots: int
    max_rank: int
    loaded: tuple[ServedAdapter, ...] = ()


class LayoutChoice(msgspec.Struct, frozen=True, tag=True):
    """What ``--layout auto`` is on all hosts of a server, and why; node 0 tells the others."""

    layout: str
    why: str
    layers: tuple[tuple[int, int], ...] = ()  # of each stage, as predicted; empty: none, or divided by shares


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved values of ``auto`` and absent options; the same on all ranks."""

    device: str  # cpu or cuda
    dtype: str
    kv_dtype: str = "bfloat16"  # of keys and values in the cache
    sum_dtype: str = "float32"  # of the messages of partial sums
    activations: str = "float"  # inputs of products with packed weights: float or int8
    allreduce: str  # as requested; ``policies`` holds the algorithms
    transport: str  # shared-memory, sockets, process-group, peer-memory, or none for a single rank
    max_model_len: int
    num_blocks: int
    buffer_blocks: int | None = None  # set when the cache is on the host: cache blocks a step may use
    weights: WeightPlan = EVERYTHING_RESIDENT
    peer_blocks: int = 0  # of a kernel that sums over peer memory; 0: another transport
    transport_reason: str = ""  # why ``auto`` chose a slower transport; empty if it did not
    num_nodes: int = 1
    num_replicas: int = 1
    stages: StagePlan | None = None  # that prompts or all rows pass; None: ranks compute together
    layout_note: str = ""  # for the ready message and GET /comm; empty: tensor, without a choice
    inside: tuple[NamedPolicy, ...] = ()  # hybrid's sums of prompts in the memory of a stage of several ranks
    stage_codec: str = "none"  # of hidden states
    overlap: bool = False  # compute one half of a prompt while the other half is summed
    plan_ahead: bool = False  # launch a step before the previous one has finished, where possible
    link: LinkFacts | None = None  # the emulated wire between the nodes
    policies: tuple[NamedPolicy, ...] = (NamedPolicy("auto", Policy(())),)  # the server's own first
    adapters: AdapterPlan | None = None  # None: no LoRA adapters
    draft: str = ""  # where rank 0 opens the model that drafts; empty: there is none

    @property
    def policy_names(self) -> tuple[str, ...]:
        """The policies that a request may name; in hybrid each again for prompts that all ranks compute together."""
        names = tuple(policy.name for policy in self.policies)
        hybrid = self.stages is not None and not self.is_pipeline
        return (*names, *(f"{name}/tensor" for name in names)) if hybrid else names

    @property
    def is_pipeline(self) -> bool:
        return self.stages is not None and self.stages.pipeline


class RankWork(msgspec.Struct, frozen=True, kw_only=True):
    """The second line. ``location`` opens the model without network access. ``inboxes``: as they are on several hosts."""

    location: str
    config: ServeConfig
    plan: RunPlan
    inboxes: tuple[str, ...] = ()  # replaces the identity's, which has no addresses of other hosts


def rank_name(rank: int, tp: int, num_replicas: int) -> str:
    """The rank's number, and its replica if there are several replicas of ``tp`` ranks."""
    return str(rank) if num_replicas == 1 else f"{rank} (replica {rank // tp})"
