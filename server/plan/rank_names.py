"""What people read a rank's number with."""


def rank_name(rank: int, tp: int, num_replicas: int) -> str:
    """The number, and where there are several replicas of ``tp`` ranks, which one it is in."""
    return str(rank) if num_replicas == 1 else f"{rank} (replica {rank // tp})"
