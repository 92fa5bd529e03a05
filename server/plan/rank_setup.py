"""The two messages that a rank process reads from its standard input: its identity, then its work.

Two lines of JSON. After them the pipe stays open and silent for the life of the server; its end means that the parent
is gone. Ranks are started before the model has been looked at, because importing torch takes longer than that.
"""

import msgspec

from tightwire.comm.link.link import Link
from tightwire.comm.link.wire import LinkFacts
from tightwire.comm.policy.rules import Policy
from tightwire.model.weights.residency import EVERYTHING_RESIDENT, WeightPlan
from tightwire.server.config.serve import ServeConfig


class RankIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The first line: this rank's place and the addresses it needs to report from its first second."""

    rank: int
    world_size: int
    parent_pid: int
    to_parent: str  # zmq address that every rank reports to
    inboxes: tuple[str, ...]  # zmq address of each rank's own inbox; rank 0 sends plans to those of the others
    reporter: str  # zmq address where this rank's reporter listens to the parent
    store_port: int  # of the rendezvous store
    store_fd: int | None  # rank 0 only: the socket that already listens on that port
    segment_fd: int | None  # memory that all ranks share; None where that cannot be had
    node_segment_fd: int | None = None  # the same for the ranks of this rank's node, where there are several nodes
    replica_segment_fd: int | None = None  # and for the ranks of its replica, where there are several replicas
    peer_segment_fd: int | None = None  # and for the ranks of its node that hold the same weights
    store_host: str = "127.0.0.1"  # where the store listens
    interface: str | None = None  # towards the other nodes, where each is a network namespace
    throttle: Link | None = None  # what this rank's messages between nodes are slowed down to


class Arm(msgspec.Struct, frozen=True):
    """A further policy, for the requests that ask for it by name."""

    name: str
    policy: Policy
    library_policy: Policy | None = None  # as in RunPlan


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What ``auto`` and absent options came to; the same on all ranks."""

    device: str  # cpu or cuda
    dtype: str
    allreduce: str  # as it was asked for; the policy says what that came to
    transport: str  # shared-memory, process-group, peer-memory, or none for a single rank
    max_model_len: int
    num_blocks: int
    slot_blocks: int | None = None  # the cache is on the host, and a step may need so many of its blocks
    weights: WeightPlan = EVERYTHING_RESIDENT
    transport_reason: str = ""  # why ``auto`` took a slower transport than it would have liked
    num_nodes: int = 1
    num_replicas: int = 1
    overlap: bool = False  # one half of a prompt is computed while the other is summed
    plan_ahead: bool = False  # each step is launched before the last one is waited for, where that can be
    link: LinkFacts | None = None  # the emulated wire between the nodes
    policy: Policy = Policy(())  # a single rank has nothing to sum
    library_policy: Policy | None = None  # for process-group, should peer memory turn out not to be had; None: refuse
    own_arm: str = "auto"  # the name by which a request may ask for ``policy`` itself
    extra: tuple[Arm, ...] = ()

    @property
    def arms(self) -> tuple[str, ...]:
        """Every name that a request may ask for; a name's place is its arm's number."""
        return (self.own_arm, *(arm.name for arm in self.extra))


class RankWork(msgspec.Struct, frozen=True, kw_only=True):
    """The second line. ``location`` opens the model without a network."""

    location: str
    config: ServeConfig
    plan: RunPlan


def rank_name(rank: int, tp: int, num_replicas: int) -> str:
    """The number, and where there are several replicas of ``tp`` ranks, which one it is in."""
    return str(rank) if num_replicas == 1 else f"{rank} (replica {rank // tp})"
