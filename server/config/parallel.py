"""Flags of ranks, replicas, and the wire between them."""

import math
from dataclasses import dataclass

from tightwire.comm.all_reduce.names import describe_all_reduce_names, split_all_reduce_names
from tightwire.comm.codec.codec_names import has_feedback, parse_format
from tightwire.comm.link.link import parse_link
from tightwire.comm.link.wire import EMULATIONS, USER_SPACE
from tightwire.comm.policy.error_budget import ErrorBudget, parse_error_budget, parse_name_or_budget
from tightwire.option import flag_of, naming_flag, option, require, require_declared

MAX_RANKS = 64  # each rank imports torch before the model can say how many ranks it supports
CODED_DTYPE = "coded-bfloat16"  # of sums: bfloat16, coded over sockets
POLICY_PREFIX = "policy:"  # of a name that stands for a policy file


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelOptions:
    """The split of the model over ranks, and the AllReduce between them."""

    tp: int = option(1, "ranks the model is split over")
    dp: int = option(
        1,
        "replicas of the model, each split over --tp ranks, for different sequences; --tp times --dp ranks in all. The text "
        "does not depend on the replica",
    )
    tp_split: tuple[float, ...] | None = option(
        None, "relative shares of work per rank, for devices of different speed, such as 2,1", metavar="A,B"
    )
    layout: str = option(
        "auto",
        "what crosses the wire. tensor: partial sums, in prompts and in tokens; hybrid: hidden states between stages in prompts "
        "(each stage computes whole layers, and holds them besides its part of all layers), partial sums in tokens; pipeline: hidden "
        "states in both (each stage holds whole layers only); auto: over a wire the one that fits and is predicted to "
        "answer soonest (docs/layouts.md), else tensor",
        ("auto", "tensor", "hybrid", "pipeline"),
    )
    stages: int | None = option(
        None,
        "stages of --layout hybrid or pipeline, each of as many consecutive ranks, which sum their parts of its layers in memory. "
        "Default: each host, or with --nodes each node, is a stage; else each rank",
    )
    stage_codec: str = option(
        "none", "codec of hidden states between stages: none, which loses nothing, int8, int4-g32, ...", metavar="CODEC"
    )
    allreduce: str = option(
        "auto",
        f"algorithm that sums the ranks' partial results: {describe_all_reduce_names()}, or policy:FILE, a file by "
        "`tightwire bench quality` with an AllReduce for each layer, site and phase. auto is the fastest lossless one by "
        "message size; `tightwire explain` shows the cost of each",
    )
    allreduce_decode: ErrorBudget | str | None = option(
        None,
        "algorithm for rows of generated tokens, or a budget as for --comm-error-budget, within which auto chooses it; default: "
        "the one of --allreduce if it is lossless, else auto",
        metavar="NAME",
        parse=parse_name_or_budget,
    )
    comm_error_budget: ErrorBudget | None = option(
        None,
        "accuracy that auto may give up in prompt rows: the relative RMS error of one AllReduce, such as 0.01, or the mean KL of "
        "next tokens, such as kl=0.02 (`tightwire tune --quality` measures it for this model); default: none, auto is lossless",
        metavar="E",
        parse=parse_error_budget,
    )
    allreduce_extra: tuple[str, ...] = option(
        (),
        'more names as for --allreduce, that a request may choose with "tightwire": {"allreduce": "NAME"} in its body',
        parse=split_all_reduce_names,
    )
    transport: str = option(
        "auto",
        "how ranks communicate; auto: shared memory between CPU processes of one host and sockets between hosts, peer memory "
        "between GPUs that support it, torch.distributed (process-group: gloo or NCCL) otherwise",
        ("auto", "shared-memory", "sockets", "process-group", "peer-memory"),
    )
    comm_secret_file: str | None = option(
        None,
        "file with a secret of 16 bytes or more, the same on every host: sockets connect only to ranks that know it. Default: "
        "to all ranks that join this server",
        metavar="FILE",
    )
    sum_dtype: str = option(
        "auto",
        "number format of the partial sums that ranks send. auto: float32 between CPU ranks of one host, so that splitting a "
        "model costs no accuracy; --dtype between GPUs, nodes, and over --link, where bytes cost time. `tightwire bench quality` "
        "says what the narrower sums cost. coded-bfloat16: long messages over sockets take 11 to 12 bits a number instead of 16, "
        "without loss, which pays on wires below about 4gbit",
        ("auto", "float32", "bfloat16", "float16", CODED_DTYPE),
    )
    nodes: int = option(1, "nodes of equal size that hold the ranks, in order; used by hierarchical")
    link: str | None = option(
        None,
        "emulate a slow wire between the ranks on this machine: 200mbit, 2.5gbit, 300MB/s, pcie3x4, latency=50us, or a "
        "rate and a latency separated by a comma; without --nodes, each rank is a node",
        metavar="LINK",
    )
    link_emulation: str = option(
        "auto",
        "how --link is emulated: network namespaces with the kernel's rate limit (needs root and iproute2), or a transport "
        "slowed down in user space; auto: namespaces where they are available",
        EMULATIONS,
    )
    overlap: str = option(
        "auto",
        "compute one half of a prompt's step while the other half's sums are on the wire, between CPU ranks: on, off, or "
        "auto, which is on with --link and between hosts (transfers through memory would take cores from computing)",
        ("auto", "on", "off"),
    )
    numa: str = option(
        "auto",
        "auto: on a host with several NUMA nodes, such as two sockets, each CPU rank runs on one node and allocates its memory "
        "there (or on some nodes, if there are more nodes than ranks); off: the kernel places memory",
        ("auto", "off"),
    )

    def __post_init__(self) -> None:
        require_declared(self)
        require(1 <= self.tp <= MAX_RANKS, "tp", self.tp, f"1 to {MAX_RANKS}")
        most = MAX_RANKS // self.tp
        require(1 <= self.dp <= most, "dp", self.dp, f"1 to {most} with --tp {self.tp}")
        self._check_nodes()
        self._check_link()
        self._check_policies()
        self._check_stages()
        if (shares := self.tp_split) is not None:
            require(len(shares) == self.tp, "tp_split", shares, f"one number for each of the {self.tp} ranks")
            most, want = 1000 * min(shares), "finite and above 0, none more than 1000 times another"
            require(all(0 < share <= most < math.inf for share in shares), "tp_split", shares, want)

    def _check_stages(self) -> None:
        with naming_flag("stage_codec"):
            parse_format(self.stage_codec)
        require(not has_feedback(self.stage_codec), "stage_codec", self.stage_codec, "a codec without -ef")
        staged, want = self.layout in ("hybrid", "pipeline"), "given with --layout hybrid or pipeline, whose stages"
        require(staged or self.stage_codec == "none", "stage_codec", self.stage_codec, f"{want} send hidden states")
        if (num := self.stages) is None:
            return
        require(staged, "stages", num, "left out without --layout hybrid or pipeline, which have stages")
        nodes = self.nodes if self.link is None else self.wire_nodes
        want = f"2 or more, a divisor of --tp ({self.tp})"
        want += f" and a multiple of the {nodes} nodes, because the ranks of a stage share memory" if nodes > 1 else ""
        require(num > 1 and self.tp % num == num % nodes == 0, "stages", num, want)

    @property
    def num_ranks(self) -> int:
        """All ranks: rank d * tp + t is rank t of replica d."""
        return self.tp * self.dp

    @property
    def num_summing(self) -> int:
        """The ranks that sum together: those of a replica, or in a pipeline of a stage."""
        return self.tp // self.num_stages if self.layout == "pipeline" else self.tp

    @property
    def num_stages(self) -> int:
        """The stages if the layout has some: by default one on each host or node."""
        return self.stages or self.wire_nodes

    @property
    def sums_inside(self) -> bool:
        """Whether ranks that sum together are on one node: those of each of several replicas, or of a pipeline's stage."""
        return self.dp > 1 or self.layout == "pipeline"

    @property
    def sum_nodes(self) -> int:
        """The nodes of the ranks that sum together."""
        return 1 if self.sums_inside else self.nodes

    def _check_nodes(self) -> None:
        num, want = self.tp, f"a divisor of --tp ({self.tp})"
        if self.dp > 1:
            num, want = self.dp, f"a divisor of --dp ({self.dp}), because each replica is inside one node"
            require(self.link is None, "link", self.link, f"left out with --dp {self.dp}; give --dp 1")
        require(self.nodes >= 1 and num % self.nodes == 0, "nodes", self.nodes, want)

    def _check_policies(self) -> None:
        if doubled := sorted({name for name in self.allreduce_extra if self.allreduce_extra.count(name) > 1}):
            raise ValueError(f"--allreduce-extra names {', '.join(doubled)} twice")
        extra = [name for name in self.allreduce_extra if name != self.allreduce]
        want = "left out with --tp 1, because one rank sums nothing; give --tp 2 or more"
        require(self.tp > 1 or not extra, "allreduce_extra", ",".join(extra), want)
        file = next((name for name in (self.allreduce, *self.allreduce_extra) if name.startswith(POLICY_PREFIX)), None)
        for name in ("allreduce_decode", "comm_error_budget") if file else ():
            if (value := getattr(self, name)) is not None:
                both = f"{flag_of(name)} {value} and {file} both choose the AllReduce"
                raise ValueError(f"{both}; leave one of them out, or put the choice into the file's rules")

    @property
    def wire_nodes(self) -> int:
        """The nodes that ``link`` connects."""
        return self.nodes if self.nodes > 1 else self.tp

    def _check_link(self) -> None:
        if self.link is None:
            require(self.link_emulation == "auto", "link_emulation", self.link_emulation, "given with --link")
            return
        with naming_flag("link"):
            parse_link(self.link)
        want = "left out with --tp 1, because one rank sends nothing; give --tp 2 or more"
        require(self.tp > 1, "link", self.link, want)
        fits = self.transport in ("auto", "sockets", "process-group") or self.link_emulation == USER_SPACE
        want = f"auto, sockets or process-group with --link {self.link}, because memory would bypass the wire; or give "
        require(fits, "transport", self.transport, f"{want}--link-emulation {USER_SPACE}")
