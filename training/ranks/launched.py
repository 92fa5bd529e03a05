"""Opens the store through which the ranks that torchrun launched connect."""

from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.group.topology import Topology


def open_store(environment: Mapping[str, str], topology: Topology, *, timeout_s: float) -> Store:
    """The store through which ranks connect. Torchrun's agent serves it if its variables say so, else rank 0 does.

    Keys are separate for each restart by torchrun, so ranks of an earlier attempt do not connect to these.

    Raises:
        ValueError: there are several ranks, and the address is missing or invalid.
        ConnectionError: no store can be reached or opened at the address.
    """
    if topology.world_size == 1:
        return HashStore()
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ValueError(
            f"there are {topology.world_size} ranks, and MASTER_ADDR and MASTER_PORT are not set; start the ranks "
            "with torchrun"
        )
    agent_has_it = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = topology.rank == 0 and not agent_has_it
    try:
        store = TCPStore(
            host,
            int(port),
            is_master=is_master,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        wrong = "a port that is free on it" if is_master else "its port, and it must be running"
        raise ConnectionError(
            f"ranks cannot connect at MASTER_ADDR={host} MASTER_PORT={port}: {str(error).rstrip('.')}. They must name the first "
            f"rank's machine and {wrong}"
        ) from None
    return PrefixStore(f"attempt-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
