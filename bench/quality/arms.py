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
_POLICY = "policy:"
WEIGHTS = "weights:"  # exact sums, with weights that were encoded by a codec


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    name: str
    policy: Policy
    weight_codec: str = "none"  # as ``serve --weight-codec`` sets it for the layers' matrices

    def algorithm(self, site: str, layer: int) -> str:
        """The AllReduce of prompt rows at this site and layer."""
        return self.policy.choices(site, layer, "prefill")[0].algorithms[0]


def exact_arm() -> Arm:
    return Arm(name=EXACT, policy=one_for_all(LOSSLESS))


def make_arm(name: str, config: LlamaConfig) -> Arm:
    """Make an arm that sums as ``serve --allreduce NAME`` does.
    ``policy:FILE`` stands for ``serve --comm-policy FILE`` and ``weights:CODEC`` for ``serve --weight-codec CODEC``.
    The AllReduce applies to prompt rows. Generated rows and embeddings are exact unless a policy file says otherwise.

    Raises:
        ValueError: the AllReduce is unknown or needs several nodes, or the file is for another model.
    """
    check_name(name)
    if name.startswith(WEIGHTS):
        return Arm(name=name, policy=one_for_all(LOSSLESS), weight_codec=name.removeprefix(WEIGHTS))
    if name.startswith(_POLICY):
        return file_arm(name, read_policy_file(Path(name.removeprefix(_POLICY))), config)
    lossy = tuple(Rule(site, "prefill", (_choice(name),)) for site in LOSSY_SITES)
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
    if name.startswith(_POLICY):
        read_policy_file(Path(name.removeprefix(_POLICY)))
    elif name.startswith(WEIGHTS):
        codecs = [codec for codec in WEIGHT_CODECS if codec != "none"]
        if name.removeprefix(WEIGHTS) not in codecs:
            raise ValueError(f"{name!r}: weights come through {' or '.join(codecs)}, such as {WEIGHTS}{codecs[0]}")
    elif name.partition(":")[0] == "hierarchical":
        raise ValueError(
            f"{name!r} sums between nodes, and these ranks are on one; its quantized leg is that of flash:CODEC,CODEC "
            "between as many ranks as there are nodes"
        )
    else:
        parse_all_reduce(name)


def bytes_per_token(arm: Arm, config: LlamaConfig, world_size: int, rows: int, elem_bytes: int) -> float:
    """Bytes a rank sends per token of a ``rows``-token prompt in all layers' AllReduces, averaged over ranks."""
    names = Counter(arm.algorithm(site, layer) for site in LOSSY_SITES for layer in range(config.num_layers))
    return sum(
        count * bytes_at(name, config.hidden_size, world_size, rows, elem_bytes) for name, count in names.items()
    )


@cache
def bytes_at(name: str, row_elems: int, world_size: int, rows: int, elem_bytes: int) -> float:
    """Bytes a rank sends per row in one AllReduce of ``rows`` rows, averaged over ranks."""
    groups = in_process_groups(world_size)
    sent = [make_all_reduce(name, group).wire_bytes(rows * row_elems, elem_bytes) for group in groups]
    return sum(sent) / world_size / rows


def _choice(name: str) -> Choice:
    return Choice(up_to_bytes=None, algorithms=(name,), reason="asked for")
