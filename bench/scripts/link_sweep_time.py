"""How long a sweep over links must take at least: the time that its bytes are on the wire."""

import argparse

from tightwire.bench.ttft.options import TtftOptions, is_policy
from tightwire.bench.ttft.wire import WireFormulas
from tightwire.comm.all_reduce.names import split_all_reduce_names
from tightwire.comm.link.link import parse_link
from tightwire.comm.policy.setting import ELEM_BYTES
from tightwire.model.open import open_checkpoint

_DTYPE = "bfloat16"
_WARM_UPS = 2  # untimed turns of `bench ttft`
_REPLAYS = 2  # exact ones, at most, for each answer that is checked


def least_wire_s(given: argparse.Namespace) -> float:
    """Seconds, of the prompts' AllReduces on all links of ``ttft_link``'s command line."""
    config = open_checkpoint(given.model, 0).config
    wire_nodes = given.nodes if given.nodes > 1 else given.tp
    formulas = WireFormulas(
        world_size=given.tp, num_nodes=given.nodes, wire_nodes=wire_nodes, elem_bytes=ELEM_BYTES[_DTYPE]
    )
    rows = min(given.prompt_len, given.max_num_batched_tokens)
    message_bytes = rows * config.hidden_size * ELEM_BYTES[_DTYPE]
    messages = (2 * config.num_layers + 1) * given.prompt_len / rows
    exact = messages * formulas.crossing("two-shot", message_bytes)
    num_bytes = 0.0
    for name in split_all_reduce_names(given.algorithms):
        own = exact
        if name != "auto" and not is_policy(name):
            own = messages * formulas.crossing(name, message_bytes)
        num_bytes += (_WARM_UPS + given.repeats) * own + _REPLAYS * TtftOptions().answers * exact
    rates = [parse_link(link).bytes_per_s for link in given.links.split(",")]
    return sum(num_bytes / rate for rate in rates if rate)
