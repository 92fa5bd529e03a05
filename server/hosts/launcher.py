"""Fills the options of several hosts from the variables of torchrun, Slurm and LeaderWorkerSet, and says from which."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tightwire.server.config.hosts import HostOptions, split_address
from tightwire.server.config.serve import ServeConfig


@dataclass(frozen=True, slots=True)
class _Launcher:
    """One launcher's variables: of the number of nodes, of this node's number, and of node 0's address."""

    name: str
    nnodes: str
    node_rank: str
    master: tuple[str, ...]  # the first of them that is set
    num_local: tuple[str, ...] = ()  # of the processes it starts on this node, which must be one


_SLURM_NAMES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
_SLURM_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_LAUNCHERS = (
    _Launcher("LeaderWorkerSet", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", ("LWS_LEADER_ADDRESS",)),
    _Launcher("torchrun", "GROUP_WORLD_SIZE", "GROUP_RANK", ("MASTER_ADDR",), ("LOCAL_WORLD_SIZE",)),
    _Launcher("torchrun", "WORLD_SIZE", "RANK", ("MASTER_ADDR",), ("LOCAL_WORLD_SIZE",)),
    _Launcher("Slurm", "SLURM_NNODES", "SLURM_NODEID", _SLURM_NAMES, _SLURM_TASKS),
)


def resolve_hosts(config: ServeConfig, environment: Mapping[str, str]) -> tuple[ServeConfig, list[str]]:
    """The config with this node's place filled in, and a line for each value that a variable gave.

    With several hosts ``--nodes`` becomes the number of hosts. ValueError: a value is missing or wrong; the message says where it came from.
    """
    options, notes = config.hosts, []
    launcher = next((known for known in _LAUNCHERS if {known.nnodes, known.node_rank} <= environment.keys()), None)
    if launcher is not None and options.nnodes is None:
        options = replace(options, nnodes=_number(environment, launcher.nnodes))
        notes.append(f"--nnodes {options.nnodes}: from {launcher.name}'s {launcher.nnodes}")
    if not options.several:
        for name in ("node_rank", "master_addr", "interface"):
            if (value := getattr(options, name)) not in (None, 0) and options.nnodes is None:
                raise ValueError(f"--{name.replace('_', '-')} {value} is for several hosts; add --nnodes N")
        return config, []
    if launcher is not None:
        for name in launcher.num_local:
            # Slurm writes 2(x3),1: two tasks on each of three nodes, one on the fourth.
            if (most := re.match(r"\d+", environment.get(name, ""))) and int(most[0]) > 1:
                several = f"{launcher.name} starts {most[0]} processes on this node ({name})"
                raise ValueError(f"{several}; start one, which starts the node's ranks itself")
        if options.node_rank is None:
            options = replace(options, node_rank=_number(environment, launcher.node_rank))
            notes.append(f"--node-rank {options.node_rank}: from {launcher.name}'s {launcher.node_rank}")
        master = next((name for name in launcher.master if environment.get(name)), None)
        if options.master_addr is None and master is not None:
            # The port is ours: torchrun's own store listens on MASTER_PORT.
            options = replace(options, master_addr=first_host(environment[master]))
            notes.append(f"--master-addr {options.master_addr}: from {launcher.name}'s {master}")
    for name in ("node_rank", "master_addr"):
        if getattr(options, name) is None:
            variables = "no variable of torchrun, Slurm or LeaderWorkerSet gives it here"
            raise ValueError(f"--nnodes {options.nnodes} needs --{name.replace('_', '-')}; {variables}")
    try:
        return _spread(replace(config, hosts=options)), notes
    except ValueError as error:
        if not notes:
            raise
        raise ValueError(f"{error} ({'; '.join(notes)}; --nnodes 1 ignores the variables)") from None


def planned_hosts(config: ServeConfig, num: int) -> ServeConfig:
    """The config of node 0 of ``num`` hosts that need not be there."""
    hosts = HostOptions(nnodes=num, node_rank=0, master_addr="node-0")
    return resolve_hosts(replace(config, hosts=hosts), {})[0]


def _spread(config: ServeConfig) -> ServeConfig:
    parallel, options = config.parallel, config.hosts
    nnodes = options.nnodes or 1
    flag, num = ("--dp", parallel.dp) if parallel.dp > 1 else ("--tp", parallel.tp)
    if num % nnodes:  # a replica is inside one host
        raise ValueError(f"{flag} {num} is no multiple of the {nnodes} hosts, which have equal numbers of ranks")
    if parallel.link is not None or parallel.nodes not in (1, nnodes):
        raise ValueError("--link and --nodes emulate nodes on one host; leave them out with several hosts")
    if parallel.transport in ("shared-memory", "peer-memory"):
        raise ValueError(f"--transport {parallel.transport} is inside one host; leave it out with {nnodes} hosts")
    port = split_address(options.master_addr or "")[1]
    if port in options.ports:
        taken = f"{port}, the port of --master-addr where nodes meet; choose another of them"
        raise ValueError(f"--port-range {options.port_range} contains {taken}")
    if len(options.ports) <= (num := 2 * parallel.num_ranks):
        raise ValueError(f"--port-range {options.port_range} must hold {num + 1} ports: the store's, and two a rank")
    return replace(config, parallel=replace(parallel, nodes=nnodes))


def first_host(names: str) -> str:
    """The first name of Slurm's compressed list: ``node[03-07,12],other`` begins with ``node03``."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", names.strip())
    return "".join(part or "" for part in found.groups()) if found else names


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {environment[name]!r}") from None
