"""Partitioned layers give the logits of a rank's own, bit for bit, and send the bytes of the formulas."""

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.comm.in_process_partition import in_process_partition
from helpers.model.partition_bodies import Work, World, build, settle
from helpers.model.partition_checks import NUM_LAYERS, PROMPTS, check_bytes, check_logits, plan_for, run_threads
from helpers.model.tiny_gguf import make_tiny_gguf
from tiny import make_tiny
from torch import Tensor

from tightwire.comm.errors import PeerLostError
from tightwire.comm.group.group import in_process_groups
from tightwire.comm.ledger.ledger import GATHERING
from tightwire.comm.protocols import Moved
from tightwire.comm.transport.in_process import InProcessTransport
from tightwire.model.checkpoint.errors import WeightsError
from tightwire.model.layout import make_layout
from tightwire.model.open import open_checkpoint
from tightwire.model.prepare import PrepareOptions, prepare
from tightwire.model.weights import EVERYTHING_RESIDENT, WEIGHT_CODECS
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.load import CheckpointStore
from tightwire.model.weights.packed_layer import pack_model
from tightwire.model.weights.partition_store import LINE_BYTES, PartitionCut, PartitionStore
from tightwire.model.weights.residency import WeightSizes
from tightwire.model.weights.streamed import StreamedWeights


@pytest.mark.parametrize("num_bytes", [4096, 5 * 4096, 42 * 4096, 1 << 20])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_a_layer_is_cut_in_equal_parts_and_a_tail(num_bytes: int, num_ranks: int) -> None:
    cut = PartitionCut(num_bytes, num_ranks)
    tail_bytes = num_bytes - cut.tail_start
    assert cut.part_bytes % LINE_BYTES == 0
    assert 0 <= tail_bytes < num_ranks * LINE_BYTES
    assert num_ranks * cut.kept_bytes == num_bytes + (num_ranks - 1) * tail_bytes
    assert cut.pass_bytes * num_ranks == (num_ranks - 1) * (num_bytes - tail_bytes)


@pytest.mark.parametrize(
    ("world", "codec"),
    [
        (World(1, 2), "none"),
        (World(1, 3), "int4"),
        (World(2, 2), "int8"),
        (World(1, 4, num_nodes=2), "none"),
        (World(2, 2, num_nodes=2), "int4"),
    ],
    ids=str,
)
def test_logits_are_those_of_unshared_weights(world: World, codec: str, tmp_path: Path) -> None:
    location = make_tiny(tmp_path / "m", num_hidden_layers=NUM_LAYERS)
    work = Work(str(location), plan_for(world, codec), PROMPTS[: world.dp])
    done = run_threads(world, work)
    check_logits(world, work, done)
    check_bytes(world, work, done)


@pytest.mark.parametrize("num_streamed", [3, 5])
def test_packed_weights_with_resident_layers(num_streamed: int, tmp_path: Path) -> None:
    location = make_tiny_gguf(tmp_path / "m.gguf", quant="Q4_1", num_hidden_layers=NUM_LAYERS)
    world = World(1, 3)
    work = Work(str(location), plan_for(world, "none", num_streamed), PROMPTS[:3])
    done = run_threads(world, work)
    check_logits(world, work, done)
    check_bytes(world, work, done)


@pytest.mark.parametrize("codec", ["none", "int4"])
@pytest.mark.parametrize("world", [World(1, 3), World(2, 4, num_nodes=2)], ids=str)
def test_a_prepared_folder_is_partitioned(world: World, codec: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path / "m", num_hidden_layers=NUM_LAYERS)))
    options = PrepareOptions(tp=world.tp, dtype="float32", codec=WEIGHT_CODECS[codec])
    prepare(checkpoint, tmp_path / "out", options)
    work = Work(str(tmp_path / "out"), plan_for(world, codec), PROMPTS[: world.dp])
    done = run_threads(world, work)
    check_bytes(world, work, done)
    from_checkpoint = replace(work, location=str(tmp_path / "m"))
    check_logits(world, from_checkpoint, done)


@contextmanager
def loaded(world: World, work: Work, timeout_s: float = 120.0) -> Iterator[list[StreamedWeights]]:
    """Each rank's weights; their buffers are full. Replicas are of one rank each."""
    replicas = [in_process_groups(1)[0] for _ in range(world.dp)]
    peers = in_process_partition(1, world.dp, timeout_s=timeout_s)
    with ThreadPoolExecutor(world.dp) as pool:
        runners = list(pool.map(build, replicas, peers, [work] * world.dp))
    weights = [runner.weights for runner in runners if isinstance(runner.weights, StreamedWeights)]
    try:
        for own in weights:
            settle(own)
        yield weights
    finally:
        for runner in runners:
            runner.close()


def test_a_rank_that_loads_longer_than_a_gather_may_take_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, delays = CheckpointStore.read, iter([1.2])

    def read_late(self: CheckpointStore, layer: int, into: Tensor, moved: Moved) -> Tensor:
        time.sleep(next(delays, 0.0))
        return read(self, layer, into, moved)

    monkeypatch.setattr(CheckpointStore, "read", read_late)
    world = World(1, 2)
    location = make_tiny(tmp_path / "m", num_hidden_layers=NUM_LAYERS)
    with loaded(world, Work(str(location), plan_for(world), PROMPTS[:2]), timeout_s=1.0) as weights:
        assert [own.flow().num_layers for own in weights] == [2, 2]


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_planned_sizes_equal_the_memory_in_use(codec: str, tmp_path: Path) -> None:
    world = World(1, 3)
    location = make_tiny(tmp_path / "m", num_hidden_layers=NUM_LAYERS)
    work = Work(str(location), plan_for(world, codec, 5), PROMPTS[:3])
    config = open_checkpoint(work.location).config
    shard = make_layout(config, 1).shards[0]
    sizes = WeightSizes(config, shard, WeightFormats(), torch.float32, codec)
    plain = pack_model(config, shard, WeightFormats(), torch.float32).plain
    with loaded(world, work) as weights:
        for own in weights:
            pools = [own.pool] if own.fetcher.read_pool is None else [own.pool, own.fetcher.read_pool]
            store = own.store
            assert isinstance(store, PartitionStore)
            kept = sum(layer.nbytes for layer in store._kept.values())
            buffers = sum(buffer.memory.nbytes for pool in pools for buffer in pool.buffers)
            streamed = sum(plain[layer].num_bytes for layer in work.plan.streamed)
            assert sizes.kept(work.plan) == kept
            assert sizes.on_device(work.plan) == sizes.on_device(EVERYTHING_RESIDENT) - streamed + buffers + kept
            assert sizes.on_host(work.plan) == 0 and sizes.in_pool(work.plan, "cpu") == sizes.on_device(work.plan)


def walk(weights: StreamedWeights) -> None:
    for layer in range(NUM_LAYERS):
        weights.layer(layer)
        weights.release(layer)


def test_waits_for_a_slower_replica_count_as_late_not_as_fetching(tmp_path: Path) -> None:
    location = make_tiny(tmp_path / "m", num_hidden_layers=NUM_LAYERS)
    with loaded(World(1, 2), Work(str(location), plan_for(World(1, 2)), PROMPTS[:2])) as (fast, slow):
        store = fast.store
        assert isinstance(store, PartitionStore)
        timeout_s = fast._timeout_s = (
            0.05  # of bytes that do not come: while they are not asked for, that is nobody's fault
        )

        def num_asked() -> int:
            return sum(event.kind == "ask" for event in list(fast.pool.events))

        def come_late() -> None:
            while store.others_late(2)[1] < math.inf:
                time.sleep(0.001)
            seen = num_asked()
            while num_asked() < seen + 3:
                time.sleep(0.001)
            fast._timeout_s = 60
            while num_asked() < seen + 4:
                time.sleep(0.001)
            walk(slow)

        with ThreadPoolExecutor(1) as pool:
            came = pool.submit(come_late)
            walk(fast)
            came.result()
        settle(fast)
        assert fast.flow().late_s >= 2 * timeout_s
        [count] = store._peers.inside.ledger.counters.counts()
        assert (count.op, count.phase, count.calls) == ("all_gather", GATHERING, fast.flow().num_layers)


def test_a_gather_that_stalls_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = make_tiny(tmp_path / "m", num_hidden_layers=NUM_LAYERS)
    stuck = threading.Event()
    with loaded(World(1, 2), Work(str(location), plan_for(World(1, 2)), PROMPTS[:2])) as weights:
        gather = InProcessTransport.gather_into
        monkeypatch.setattr(InProcessTransport, "gather_into", lambda *args: stuck.wait() and gather(*args))
        weights[0]._timeout_s = 0.05
        try:
            for layer in range(2):
                for own in weights:
                    own.layer(layer)
                    own.release(layer)
            with pytest.raises(
                WeightsError, match="layer 2 did not arrive from the parts that ranks 0, 1 keep: no bytes arrived"
            ):
                weights[0].layer(2)
        finally:
            stuck.set()


def test_a_lost_replica_is_named_in_the_others_pass(tmp_path: Path) -> None:
    world = World(1, 3)
    location = make_tiny(tmp_path / "m", num_hidden_layers=NUM_LAYERS)
    with loaded(world, Work(str(location), plan_for(world, "int8"), PROMPTS[:3])) as weights:
        weights[2].close()
        for rank in (0, 1):
            with pytest.raises(PeerLostError, match=f"rank {rank} lost rank 2") as caught:
                for layer in range(NUM_LAYERS):
                    weights[rank].layer(layer)
                    weights[rank].release(layer)
            assert caught.value.ranks == (2,)
