"""The arms of ``bench quality``: an arm is a policy for all of a model's messages, named as ``serve`` names it."""

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
MIX = "mix"  # what a search has found
LOSSY_SITES = ("o_proj", "down_proj")
_POLICY = "policy:"
WEIGHTS = "weights:"  # exact sums, of weights that have been through a codec


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    name: str
    policy: Policy
    weight_codec: str = "none"  # what the layers' plain matrices have been through: ``serve --weight-codec``

    def algorithm(self, site: str, layer: int) -> str:
        """What sums a prompt's rows there."""
        return self.policy.choices(site, layer, "prefill")[0].algorithms[0]


def exact_arm() -> Arm:
    return Arm(name=EXACT, policy=one_for_all(LOSSLESS))


def make_arm(name: str, config: LlamaConfig) -> Arm:
    """The arm of ``serve --allreduce NAME``, with ``policy:FILE`` of ``serve --comm-policy FILE``, with ``weights:CODEC`` of
    ``serve --weight-codec CODEC``.

    Prompt rows go as the name says; generated rows and embeddings are exact, but where a file says otherwise.

    Raises:
        ValueError: no such AllReduce, one that needs several nodes, or a file that is not for this model.
    """
    check_name(name)
    if name.startswith(WEIGHTS):
        return Arm(name=name, policy=one_for_all(LOSSLESS), weight_codec=name.removeprefix(WEIGHTS))
    if name.startswith(_POLICY):
        return file_arm(name, read_policy_file(Path(name.removeprefix(_POLICY))), config)
    lossy = tuple(Rule(site, "prefill", (_choice(name),)) for site in LOSSY_SITES)
    return Arm(name=name, policy=Policy((*lossy, *one_for_all(LOSSLESS).rules)))


def file_arm(name: str, file: PolicyFile, config: LlamaConfig) -> Arm:
    """The arm of a policy file.

    Raises:
        ValueError: the file is for another model.
    """
    check_shape(file, name, {"num_layers": config.num_layers, "hidden_size": config.hidden_size})
    return Arm(name=name, policy=apply(one_for_all(LOSSLESS), file))


def check_name(name: str) -> None:
    """Raises ValueError for what cannot be an arm, as far as that can be told without a model."""
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
    """Bytes that a rank sends for one token of a prompt of ``rows``, in all AllReduces of all layers; mean of the ranks."""
    names = Counter(arm.algorithm(site, layer) for site in LOSSY_SITES for layer in range(config.num_layers))
    return sum(
        count * bytes_at(name, config.hidden_size, world_size, rows, elem_bytes) for name, count in names.items()
    )


@cache
def bytes_at(name: str, row_elems: int, world_size: int, rows: int, elem_bytes: int) -> float:
    """The same for one AllReduce."""
    groups = in_process_groups(world_size)
    sent = [make_all_reduce(name, group).wire_bytes(rows * row_elems, elem_bytes) for group in groups]
    return sum(sent) / world_size / rows


def _choice(name: str) -> Choice:
    return Choice(up_to_bytes=None, algorithms=(name,), reason="asked for")
