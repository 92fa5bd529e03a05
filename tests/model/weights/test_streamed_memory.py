"""The memory of streamed weights is that of the plan, and passes use no more."""

import sys
from typing import Any

import pytest
from helpers.model.forked_cases import measure_each
from tiny import make_tiny

from tightwire.model.open import open_checkpoint
from tightwire.model.prepare import PrepareOptions, prepare
from tightwire.model.weights import WEIGHT_CODECS

# Each case in a child of a process that has imported everything.
_MEASURE = """
import time
from tightwire.comm.codec.codec import parse_codec
from tightwire.model.open import open_checkpoint
from tightwire.model.layout import make_layout
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.load import CheckpointStore
from tightwire.model.weights.load import load_weights
from tightwire.model.weights.residency import WeightSizes
from tightwire.model.weights import WEIGHT_CODECS, WeightPlan
from tightwire.server.plan.weight_decision import spread

def measure(model, origin, codec, io):
    checkpoint = open_checkpoint(model)
    config, prepared = checkpoint.config, checkpoint.prepared
    shard = make_layout(config, 1).shards[0]
    plan = WeightPlan(source="stream", origin=origin, codec=codec, io=io, streamed=spread(config.num_layers, 10))
    sizes = WeightSizes(config, shard, WeightFormats(), torch.bfloat16, codec)
    coder = parse_codec(WEIGHT_CODECS[codec])  # what is compiled once, and threads, are no weights
    coder.decode(coder.encode(torch.ones(4096).bfloat16()), 4096, torch.bfloat16)

    before = peak_from_here()
    fetching = {"device": torch.device("cpu"), "timeout_s": 60.0}
    if prepared is None:
        files = CheckpointStore.for_plan(checkpoint.reader(), config, shard, plan, torch.bfloat16, WeightFormats())
    else:
        files = prepared.store(0, plan.io)
    weights = load_weights(files, plan, **fetching)

    def run_passes(count):
        for _ in range(count):
            for layer in range(config.num_layers):
                weights.layer(layer)
                weights.release(layer)

    run_passes(2)
    peak = status("VmHWM") - before
    while not weights.fetcher.is_full:  # nothing is under way then
        time.sleep(0.001)
    before = peak_from_here()
    run_passes(4)
    passes = status("VmHWM") - before
    layer_bytes = weights.pool.buffers[0].memory.nbytes
    weights.close()
    print(json.dumps([sizes.in_pool(plan, "cpu"), peak, passes, layer_bytes]), flush=True)
"""

_BIG: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 3072, "num_hidden_layers": 12, "vocab_size": 8192}


_CASES = (
    ("checkpoint", "host", "none", "buffered"),
    ("checkpoint", "host", "int4", "buffered"),
    ("prepared", "disk", "none", "direct"),
    ("prepared", "disk", "int8", "buffered"),
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], list[int]]:
    """The bytes of each case: of the plan, of the peak, of passes, of a layer."""
    folder = tmp_path_factory.mktemp("big")
    model = make_tiny(folder / "m", dtype="bfloat16", **_BIG)
    arguments = []
    for kind, origin, codec, io in _CASES:
        if kind == "prepared":
            options = PrepareOptions(dtype="bfloat16", codec=WEIGHT_CODECS[codec])
            prepare(open_checkpoint(str(model)), folder / codec, options)
        arguments.append((str(folder / codec if kind == "prepared" else model), origin, codec, io))
    # What is freed goes back at once, so that what is allocated anew shows.
    told = measure_each(_MEASURE, arguments, MALLOC_MMAP_THRESHOLD_="65536")
    return dict(zip(_CASES, told, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("case", _CASES, ids="-".join)
def test_peak_memory_is_the_plans_and_passes_add_nothing(
    case: tuple[str, ...], measured: dict[tuple[str, ...], list[int]]
) -> None:
    plan, peak, passes, layer = measured[case]
    assert layer > 10e6 and plan > 40e6
    # Beside the plan: the piece in hand while loading, which where layers wait encoded is a plain one, and its file's pages.
    assert 0.95 * plan <= peak <= 1.1 * plan + (24 << 20), f"{peak / 1e6:.0f} MB, and {plan / 1e6:.0f} MB planned"
    assert passes < layer / 8, f"{passes / 1e6:.1f} MB more in passes; a layer has {layer / 1e6:.1f} MB"
