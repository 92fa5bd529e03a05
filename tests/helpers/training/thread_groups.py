"""The lane groups of ranks that are threads of one process."""

from tightwire.comm.group.nodes import in_process_node_groups
from tightwire.training.ranks.groups import TrainGroups


def in_process_train_groups(world_size: int, num_nodes: int = 1, timeout_s: float = 30.0) -> list[TrainGroups]:
    """The groups by rank."""
    lanes = {lane: in_process_node_groups(world_size, num_nodes, timeout_s) for lane in ("gather", "reduce", "main")}
    return [TrainGroups(**{lane: groups[rank] for lane, groups in lanes.items()}) for rank in range(world_size)]
