"""Measures where activations in 8 bits lose accuracy: the KL from float32 when only some products of the layers take them.

    python tools/activation_sites.py smollm2-135m [--tokens 2048]

Prints a table of Markdown. There is a row for the default (no product), for all products, for those of each site, and for all products of
each layer. KL is in nats, the mean over all tokens of some prose, of all logits, with one rank; the head stays in float32.
"""

import argparse
import re
import sys
from dataclasses import replace

import torch
from torch import Tensor

from tightwire.bench.quality.measure import make_pool, score
from tightwire.bench.quality.options import QualityOptions
from tightwire.bench.quality.ranks import ThreadRanks
from tightwire.bench.quality.setting import Setting, exact_arm, make_setting
from tightwire.comm.group.host import num_cores
from tightwire.model.weights.formats import WeightFormats

SITES = {"q, k, v": "[qkv]_proj", "o_proj": "o_proj", "gate, up": "(gate|up)_proj", "down_proj": "down_proj"}


def hidden_states(setting: Setting, dtype: torch.dtype, formats: WeightFormats | None) -> tuple[Tensor, Tensor]:
    """Return (T, D) final hidden states of the text's scored rows, and the head (V, D); without ``formats`` of plain weights."""
    sizes = {"num_sequences": setting.options.batch, "max_tokens": setting.options.window}
    with ThreadRanks(setting.checkpoint, 1, dtype=dtype, formats=formats, **sizes) as ranks:
        ranks.set_arms([exact_arm()])
        rows = [
            setting.windows.scored(ranks.forward(setting.windows.token_ids_NL[list(numbers)], 0))
            for numbers in setting.batches(setting.windows.measured)
        ]
        return torch.cat(rows), ranks.head_VD


def products(num_layers: int) -> dict[str, str]:
    """Return the rows of the table: which products, as a pattern of their weights' names."""
    layers = {f"layer {layer}": rf"\.{layer}\..*_proj" for layer in range(num_layers)}
    return {"none, the default": "$.", "all": "_proj", **SITES, **layers}


def say(line: str) -> None:
    """Print a line at once: each takes seconds."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2048)
    given = parser.parse_args()
    setting = make_setting(QualityOptions(model=given.model, tokens=given.tokens))
    if not setting.formats.packed:
        raise SystemExit(f"{given.model} has no packed weights, which activations in 8 bits are for")
    exact_TD, head_VD = hidden_states(setting, torch.float32, None)
    next_ids_T = setting.windows.next_ids(setting.windows.measured)
    say("| products in 8 bits | KL, nats | most likely token equal, % |\n|---|--:|--:|")
    with make_pool(num_cores()) as pool:
        for name, pattern in products(setting.config.num_layers).items():
            packed = {
                key: replace(own, int8_activations=bool(re.search(pattern, key)))
                for key, own in setting.formats.packed.items()
            }
            own_TD, _ = hidden_states(setting, setting.dtype, replace(setting.formats, packed=packed))
            found = score(pool, head_VD, exact_TD, {name: own_TD}, next_ids_T)[name]
            say(f"| {name} | {found.kl_T.mean():.6f} | {100 * found.same_top_T.mean():.2f} |")


if __name__ == "__main__":
    main()
