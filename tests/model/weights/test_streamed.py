"""Streamed weights give the bits of resident ones; their buffers keep their order; failures are reported."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.model.tiny_gguf import make_tiny_gguf
from helpers.server.draft_engine import drafting_engine
from helpers.server.local_engine import LocalEngine, continue_prompts, local_engine
from tiny import make_tiny
from torch import Tensor

from tightwire import buffers
from tightwire.bench.stream.order import OrderCheck
from tightwire.model.checkpoint.errors import WeightsError
from tightwire.model.layout import make_layout
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.weights import EVERYTHING_RESIDENT, WeightPlan, packed_layer
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.load import CheckpointStore, load_weights
from tightwire.model.weights.packed_layer import HostStore, LayerStore, Moved, PackedLayer, ThrottledStore, pack_model
from tightwire.model.weights.residency import WeightSizes
from tightwire.model.weights.streamed import StreamedWeights
from tightwire.server.engine.drafts import Drafter
from tightwire.server.plan.weight_decision import spread

NUM_LAYERS = 6
PROMPTS = [list(range(3, 60)), [7, 8, 9], list(range(100, 190))]


@pytest.fixture(name="checkpoint", scope="module")
def fixture_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_tiny(tmp_path_factory.mktemp("streamed") / "m", num_hidden_layers=NUM_LAYERS)))


def plan_for(num_streamed: int, origin: str, codec: str = "none", **more: object) -> WeightPlan:
    streamed = spread(NUM_LAYERS, num_streamed)
    return WeightPlan(source="stream", origin=origin, codec=codec, streamed=streamed, **more)  # pyright: ignore[reportArgumentType]


def streamed_of(local: LocalEngine) -> Iterator[StreamedWeights]:
    for runner in local.runners:
        assert isinstance(runner.weights, StreamedWeights)
        yield runner.weights


def test_streamed_layers_are_spread() -> None:
    assert spread(6, 6) == (0, 1, 2, 3, 4, 5)
    assert spread(6, 3) == (1, 3, 5)
    assert spread(32, 4) == (4, 12, 20, 28)
    for num_layers in (3, 16, 28, 80):
        for num_streamed in range(3, num_layers + 1):
            layers = spread(num_layers, num_streamed)
            gaps = {after - before for before, after in itertools.pairwise(layers)}
            assert len(set(layers)) == num_streamed
            assert max(layers) < num_layers
            assert max(gaps) - min(gaps) <= 1


@pytest.fixture(scope="module")
def resident(checkpoint: Checkpoint) -> Callable[[int], list[list[int]]]:
    """Drawn answers of resident weights on so many ranks, computed once."""

    def compute(tp: int) -> list[list[int]]:
        with local_engine(checkpoint, tp=tp, max_num_batched_tokens=64) as local:
            return continue_prompts(local.engine, PROMPTS, max_tokens=12, temperature=0.7, seed=3)

    return cache(compute)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("origin", ["host", "disk"])
@pytest.mark.parametrize("num_streamed", [3, 5, 6])
def test_tokens_are_those_of_resident_weights(
    checkpoint: Checkpoint, resident: Callable[[int], list[list[int]]], num_streamed: int, origin: str, tp: int
) -> None:
    with local_engine(
        checkpoint, tp=tp, max_num_batched_tokens=64, weight_plan=plan_for(num_streamed, origin)
    ) as local:
        assert continue_prompts(local.engine, PROMPTS, max_tokens=12, temperature=0.7, seed=3) == resident(tp)
        for weights in streamed_of(local):
            OrderCheck().check([*weights.pool.events])  # the lane goes on
            used = [event.owner for event in [*weights.pool.events] if event.kind == "use"]
            order = [layer for layer in range(NUM_LAYERS) if layer in spread(NUM_LAYERS, num_streamed)]
            assert used == order * (len(used) // len(order))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_halves_of_a_prompt_share_a_layer(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    options = {"tp": 2, "overlap": True, "dtype": dtype}
    with local_engine(checkpoint, **options) as local:
        expected = continue_prompts(local.engine, PROMPTS, max_tokens=6)
    with local_engine(checkpoint, **options, weight_plan=plan_for(6, "host")) as local:
        assert continue_prompts(local.engine, PROMPTS, max_tokens=6) == expected
        for weights in streamed_of(local):
            OrderCheck().check([*weights.pool.events])  # the lane goes on


def _drafting_by_text(checkpoint: Checkpoint, **options: Any) -> AbstractContextManager[LocalEngine]:
    drafter = Drafter(max_tokens=8, longest=8, shortest=1, num_places=8, num_recent=500)
    return local_engine(checkpoint, drafter=drafter, **options)


@contextmanager
def _drafting_by_a_model(checkpoint: Checkpoint, **options: Any) -> Iterator[LocalEngine]:
    """The model drafts for itself, with resident weights."""
    with drafting_engine({"itself": checkpoint}, "itself", text=False, **options) as (local, _, _):
        yield local


# The text repeats itself; the model knows what is most likely.
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("drafting", "settings"),
    [
        (_drafting_by_text, {"temperature": 0.8, "seed": 5, "frequency_penalty": -1.5}),
        (_drafting_by_a_model, {"temperature": 0.0}),
    ],
    ids=["text", "model"],
)
def test_a_drafted_step_reads_each_layer_once(
    checkpoint: Checkpoint, drafting: Callable[..., Any], settings: dict[str, Any], tp: int
) -> None:
    """A checked token costs no layer of its own: steps, and with them reads, become fewer, and no bit changes."""
    texts, reads = [], []
    for make in (local_engine, drafting):
        with make(checkpoint, tp=tp, weight_plan=plan_for(6, "host")) as local:
            texts.append(continue_prompts(local.engine, PROMPTS, max_tokens=40, **settings))
            for weights in streamed_of(local):
                OrderCheck().check([*weights.pool.events])  # the lane goes on
            used = [event for event in [*next(streamed_of(local)).pool.events] if event.kind == "use"]
            assert len(used) == NUM_LAYERS * local.engine.stats().counters.num_steps
            reads.append(len(used))
    assert texts[0] == texts[1]
    assert reads[1] < 0.9 * reads[0]


def test_order_of_reading_decoding_and_computing_does_not_depend_on_delays(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(5, "host", "int8")
    with local_engine(checkpoint, weight_plan=plan) as local:
        expected = continue_prompts(local.engine, PROMPTS, max_tokens=10)
    delay_stores(monkeypatch, [0.0, 0.003, 0.001])
    with local_engine(checkpoint, weight_plan=plan) as local:
        assert continue_prompts(local.engine, PROMPTS, max_tokens=10) == expected
        for weights in streamed_of(local):
            OrderCheck().check([*weights.pool.events])  # the lane goes on
            read = weights.fetcher.read_pool
            assert read is not None
            OrderCheck().check([*read.events])


@pytest.mark.parametrize("overlap", [False, True])
def test_parts_of_a_step_share_each_fetched_layer(checkpoint: Checkpoint, overlap: bool) -> None:
    with local_engine(checkpoint, tp=2) as local:
        expected = continue_prompts(local.engine, PROMPTS, max_tokens=6)
    with local_engine(checkpoint, tp=2, overlap=overlap, most_rows=32, weight_plan=plan_for(6, "host")) as local:
        assert continue_prompts(local.engine, PROMPTS, max_tokens=6) == expected
        for weights in streamed_of(local):
            OrderCheck().check([*weights.pool.events])  # the lane goes on
            # 150 prompt tokens in one pass, then five of one token each.
            assert sum(event.kind == "use" for event in weights.pool.events) == 6 * NUM_LAYERS


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("origin", ["host", "disk"])
def test_packed_weights_stream_as_they_are(quant: str, origin: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny_gguf(tmp_path / "m.gguf", quant=quant, num_hidden_layers=NUM_LAYERS)))
    with local_engine(checkpoint) as local:
        expected = continue_prompts(local.engine, PROMPTS, max_tokens=6)
    with local_engine(checkpoint, weight_plan=plan_for(4, origin)) as local:
        assert continue_prompts(local.engine, PROMPTS, max_tokens=6) == expected


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_encoded_weights_are_the_same_however_many_are_streamed(checkpoint: Checkpoint, codec: str) -> None:
    """Resident layers are not encoded, so only runs that stream the same layers are alike; and the codec shows."""
    with local_engine(checkpoint, weight_plan=plan_for(6, "host")) as local:
        exact = continue_prompts(local.engine, PROMPTS, max_tokens=12)
    answers = []
    for tp in (1, 2):
        with local_engine(checkpoint, tp=tp, weight_plan=plan_for(6, "host", codec)) as local:
            answers.append(continue_prompts(local.engine, PROMPTS, max_tokens=12))
            assert all(not weights.store.stored[0].is_plain for weights in streamed_of(local))
    if codec == "int4":
        assert answers[0] != exact


class _Jittery(LayerStore):
    """Takes its time, another one for every layer and pass."""

    name = "a jittery store"

    def __init__(self, store: LayerStore, delays: list[float]) -> None:
        self._store, self._delays = store, delays
        self.stored, self.close = store.stored, store.close

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        time.sleep(self._delays[layer % len(self._delays)])
        self._delays.append(self._delays.pop(0))
        return self._store.read(layer, into, moved)


def delay_stores(monkeypatch: pytest.MonkeyPatch, delays: list[float]) -> None:
    make = StreamedWeights.__init__

    def with_delays(
        self: StreamedWeights, outer: object, resident: object, store: LayerStore, *rest: object, **options: object
    ) -> None:
        make(self, outer, resident, _Jittery(store, list(delays)), *rest, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(StreamedWeights, "__init__", with_delays)


def test_order_and_tokens_do_not_depend_on_delays(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_engine(checkpoint) as local:
        expected = continue_prompts(local.engine, PROMPTS, max_tokens=10)
    delay_stores(monkeypatch, [0.0, 0.004, 0.001, 0.0, 0.007])
    with local_engine(checkpoint, weight_plan=plan_for(5, "disk")) as local:
        assert continue_prompts(local.engine, PROMPTS, max_tokens=10) == expected
        for weights in streamed_of(local):
            OrderCheck().check([*weights.pool.events])  # the lane goes on


def test_a_slow_source_is_as_slow_as_its_bytes_and_overlaps_with_computing(checkpoint: Checkpoint) -> None:
    """Not a timed test of ours: the source sleeps, so a pass cannot take less than its bytes' time."""
    plan = plan_for(6, "host", bytes_per_s=20e6)
    with local_engine(checkpoint, weight_plan=plan) as local:
        (weights,) = streamed_of(local)
        start_s = time.perf_counter()
        continue_prompts(local.engine, [[5]], max_tokens=5)
        elapsed_s = time.perf_counter() - start_s
        layer_bytes = weights.pool.buffers[0].memory.nbytes
        fetched = [event for event in [*weights.pool.events] if event.kind == "filled"]
        assert len(fetched) >= 5 * 6
        # Two layers may have come before, and of others what a bucket holds at once.
        assert elapsed_s >= (5 * 6 - 2) * layer_bytes / 20e6 - 0.004


class _Clock:
    """In place of ``time``: passes by sleeping alone, which takes ``late_s`` longer than it should."""

    def __init__(self, late_s: float) -> None:
        self._now_s, self._late_s = 1000.0, late_s

    def perf_counter(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds + self._late_s


@pytest.mark.parametrize(("late_s", "expected_s"), [(0.0, 1.0), (0.003, 1.0), (0.010, 1.6)])
def test_an_emulated_wire_keeps_its_rate_when_its_reader_oversleeps(
    late_s: float, expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock(late_s)
    monkeypatch.setattr(packed_layer, "time", clock)
    layer = PackedLayer({}, torch.float32, num_bytes=1000)
    store = ThrottledStore(HostStore([layer], {0: torch.zeros(1000, dtype=torch.uint8)}), 100_000)
    start_s = clock.perf_counter()

    for _ in range(100):
        store.read(0, torch.empty(0, dtype=torch.uint8), lambda num_bytes: None)

    assert clock.perf_counter() - start_s == pytest.approx(expected_s, abs=0.011)


def test_a_failing_source_ends_the_step_with_its_error(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    read = CheckpointStore.read
    passes = iter([0] * 8)

    def failing(self: CheckpointStore, layer: int, into: Tensor, moved: Moved) -> Tensor:
        if next(passes, None) is None:
            raise WeightsError(f"layer {layer} is damaged")
        return read(self, layer, into, moved)

    monkeypatch.setattr(CheckpointStore, "read", failing)
    with (
        local_engine(checkpoint, weight_plan=plan_for(6, "disk")) as local,
        pytest.raises(WeightsError, match="layer 2 is damaged"),
    ):
        continue_prompts(local.engine, PROMPTS, max_tokens=10)


def test_a_hanging_source_times_out(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def hanging(self: CheckpointStore, layer: int, into: Tensor, moved: Moved) -> Tensor:
        time.sleep(1.0)
        return into

    monkeypatch.setattr(CheckpointStore, "read", hanging)
    with local_engine(checkpoint, weight_plan=plan_for(6, "disk")) as local:
        for weights in streamed_of(local):
            weights._timeout_s = 0.1
        with pytest.raises(
            WeightsError, match=r"layer 0 did not arrive from the checkpoint's files: no bytes arrived for 0\.1 s"
        ):
            continue_prompts(local.engine, PROMPTS, max_tokens=2)


def test_layers_out_of_order_and_too_few_are_refused(checkpoint: Checkpoint) -> None:
    with local_engine(checkpoint, weight_plan=plan_for(6, "host")) as local:
        (weights,) = streamed_of(local)
        with pytest.raises(RuntimeError, match="expected 0, got 3"):
            weights.layer(3)
    two = WeightPlan(source="stream", origin="host", streamed=(1, 4))
    with (
        pytest.raises(ValueError, match="the 2 buffers hold all 2 streamed layers"),
        local_engine(checkpoint, weight_plan=two),
    ):
        pass


def test_nothing_is_allocated_for_a_pass(checkpoint: Checkpoint) -> None:
    with local_engine(checkpoint, weight_plan=plan_for(6, "host", "int4")) as local:
        (weights,) = streamed_of(local)
        before = [buffer.memory.data_ptr() for buffer in weights.pool.buffers]
        continue_prompts(local.engine, PROMPTS, max_tokens=4)
        assert [buffer.memory.data_ptr() for buffer in weights.pool.buffers] == before
        held = {t.untyped_storage().data_ptr() for t in before_tensors(weights)}
        assert len(held) == 2
        weights.close()
        weights.close()


def before_tensors(weights: StreamedWeights) -> Iterator[Tensor]:
    for layer in weights._layers.values():
        for field in layer.__slots__:
            if isinstance(tensor := getattr(layer, field), Tensor):
                yield tensor


@pytest.mark.parametrize(("origin", "codec"), [("host", "none"), ("host", "int8"), ("disk", "none")])
def test_planned_sizes_equal_the_memory_in_use(
    checkpoint: Checkpoint, origin: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, plan = checkpoint.config, plan_for(5, origin, codec)
    shard = make_layout(config, 1).shards[0]
    sizes = WeightSizes(config, shard, WeightFormats(), torch.float32, codec)
    plain = pack_model(config, shard, WeightFormats(), torch.float32).plain
    stay = sizes.on_device(EVERYTHING_RESIDENT) - sum(plain[layer].num_bytes for layer in plan.streamed)
    layers = CheckpointStore.for_plan(checkpoint.reader(), config, shard, plan, torch.float32, WeightFormats())
    weights = load_weights(layers, plan, device=torch.device("cpu"), timeout_s=60.0)
    assert isinstance(weights, StreamedWeights)
    try:
        waiting = 0
        if isinstance(weights.store, HostStore):
            waiting = sum(layer.nbytes for layer in weights.store._layers.values())
            assert waiting == sizes.on_host(plan)
        assert sizes.in_pool(plan, "cpu") == stay + _slot_bytes(weights) + waiting

        # As beside CUDA, of which no more than the sizes of its tensors is needed here, and no pinned memory.
        monkeypatch.setattr(
            buffers, "page_aligned", lambda size, device, pinned: torch.empty(size, dtype=torch.uint8, device=device)
        )
        resident = dict.fromkeys(plan.resident(NUM_LAYERS))
        beside = StreamedWeights(weights.outer, resident, weights.store, plain, torch.device("meta"), timeout_s=1.0)  # pyright: ignore[reportArgumentType]
        decoded_from = beside.fetcher._decoded_from
        assert sizes.in_pool(plan, "cuda") == stay + _slot_bytes(beside) + (
            0 if decoded_from is None else decoded_from.nbytes
        )
        assert (decoded_from is None) == (codec == "none")
    finally:
        weights.close()


class _Copies:
    """In place of a CUDA stream: the order in which copies are queued and waited for."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def record_event(self) -> Any:
        number = sum(each.startswith("copy") for each in self.order)
        self.order.append(f"copy {number}")
        return SimpleNamespace(synchronize=lambda: self.order.append(f"wait {number}"))


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_copy_of_the_stores_own_memory_is_queued_while_the_last_one_runs(
    checkpoint: Checkpoint, has_memory: bool
) -> None:
    """What is read into a buffer is waited for at once: the next read would overwrite it."""
    config, plan, formats, cpu = checkpoint.config, plan_for(3, "host", "int8"), WeightFormats(), torch.device("cpu")
    shard = make_layout(config, 1).shards[0]
    layers = CheckpointStore.for_plan(checkpoint.reader(), config, shard, plan, torch.float32, formats)
    loaded = load_weights(layers, plan, device=cpu, timeout_s=60.0)
    assert isinstance(loaded, StreamedWeights)
    loaded.store.has_memory = has_memory
    plain = pack_model(config, shard, formats, torch.float32).plain
    weights = StreamedWeights(loaded.outer, loaded._resident, loaded.store, plain, cpu, timeout_s=60.0)
    copies = _Copies()
    weights.fetcher._stream, weights.fetcher._copies = copies, True  # pyright: ignore[reportAttributeAccessIssue]
    try:
        weights.start()
        for layer in (*plan.streamed, *plan.streamed):
            weights.layer(layer)
            weights.release(layer)
    finally:
        weights.close()
        loaded.close()
    waits = [(place, int(each.split()[1])) for place, each in enumerate(copies.order) if each.startswith("wait")]
    assert len(waits) >= 4
    for place, number in waits:
        assert copies.order[:place].count(f"copy {number}") == 1
        assert (f"copy {number + 1}" in copies.order[:place]) == has_memory


def _slot_bytes(weights: StreamedWeights) -> int:
    return sum(buffer.memory.nbytes for buffer in weights.pool.buffers)
