"""Defines the arms of ``bench quality``: an arm is one AllReduce policy and weight codec for all layers."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tightwire.comm.all_reduce.registry import make_all_reduce, parse_all_reduce
from tightwire.comm.group.group import in_process_groups
from tightwire.comm.policy.policy_file import PolicyFile, apply, check_shape, read_policy_file
from tightwire.comm.policy.rules import Choice, Policy, Rule, one_for_all
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.weights import WEIGHT_CODECS

LOSSLESS = "two-shot"  # adds in float32 in rank order and rounds once, as `auto` does on CPUs
EXACT = "exact"
MIX = "mix"  # the mix that ``--search`` finds
LOSSY_SITES = ("o_proj", "down_proj")
POLICY = "policy:"
WEIGHTS = "weights:"  # exact sums, with weights that were encoded by a codec

Place = tuple[str, int]  # site and layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    name: str
    policy: Policy
    weight_codec: str = "none"  # as ``serve --weight-codec`` sets it for the layers' matrices

    def algorithm(self, site: str, layer: int) -> str:
        """The AllReduce of prompt rows at this site and layer."""
        return self.policy.choices(site, layer, "prefill")[0].algorithms[0]


def places(config: LlamaConfig) -> list[Place]:
    """Every site of every layer."""
    return [(site, layer) for site in LOSSY_SITES for layer in range(config.num_layers)]


def exact_arm() -> Arm:
    return Arm(name=EXACT, policy=one_for_all(LOSSLESS))


def make_arm(name: str, config: LlamaConfig) -> Arm:
    """Make an arm that sums as ``serve --allreduce NAME`` does.
    ``policy:FILE`` stands for ``serve --comm-policy FILE`` and ``weights:CODEC`` for ``serve --weight-codec CODEC``.
    The AllReduce applies to prompt rows. Decode rows and embeddings are exact unless a policy file says otherwise.

    Raises:
        ValueError: the AllReduce is unknown or needs several nodes, or the file is for another model.
    """
    check_name(name)
    if name.startswith(WEIGHTS):
        return Arm(name=name, policy=one_for_all(LOSSLESS), weight_codec=name.removeprefix(WEIGHTS))
    if name.startswith(POLICY):
        return file_arm(name, read_policy_file(Path(name.removeprefix(POLICY))), config)
    return one_algorithm_arm(name, name)


def one_algorithm_arm(name: str, algorithm: str, layers: tuple[int, ...] | None = None, site: str | None = None) -> Arm:
    """Make an arm that uses ``algorithm`` for prompt rows, in some ``layers`` or at one ``site`` only if they are given."""
    choices = (Choice(up_to_bytes=None, algorithms=(algorithm,), reason="requested"),)
    lossy = (Rule(each, "prefill", choices, layers) for each in LOSSY_SITES if site in (None, each))
    return Arm(name=name, policy=Policy((*lossy, *one_for_all(LOSSLESS).rules)))


def file_arm(name: str, file: PolicyFile, config: LlamaConfig) -> Arm:
    """Make the arm of a policy file.

    Raises:
        ValueError: the file is for another model.
    """
    check_shape(file, name, {"num_layers": config.num_layers, "hidden_size": config.hidden_size})
    return Arm(name=name, policy=apply(one_for_all(LOSSLESS), file))


def check_name(name: str) -> None:
    """Raise ValueError if ``name`` is not a valid arm, as far as this can be checked without a model."""
    if name.startswith(POLICY):
        read_policy_file(Path(name.removeprefix(POLICY)))
    elif name.startswith(WEIGHTS):
        codecs = [f"{WEIGHTS}{codec}" for codec in WEIGHT_CODECS if codec != "none"]
        if name not in codecs:
            raise ValueError(f"{name!r} is not a weight codec; use {' or '.join(codecs)}")
    elif name.partition(":")[0] == "hierarchical":
        raise ValueError(
            f"{name!r} sums between nodes, but these ranks are on one node; measure its quantized exchange as "
            "flash:CODEC,CODEC with one rank for each node"
        )
    else:
        parse_all_reduce(name)


def bytes_per_token(arm: Arm, config: LlamaConfig, world_size: int, rows: int, elem_bytes: int) -> float:
    """Bytes a rank sends per token of a ``rows``-token prompt in all layers' AllReduces, averaged over ranks."""
    names = Counter(arm.algorithm(*place) for place in places(config))
    return sum(
        count * bytes_at(name, config.hidden_size, world_size, rows, elem_bytes) for name, count in names.items()
    )


@cache
def bytes_at(name: str, row_elems: int, world_size: int, rows: int, elem_bytes: int) -> float:
    """Bytes a rank sends per row in one AllReduce of ``rows`` rows, averaged over ranks."""
    groups = in_process_groups(world_size)
    sent = [make_all_reduce(name, group).wire_bytes(rows * row_elems, elem_bytes) for group in groups]
    return sum(sent) / world_size / rows
