"""Which layers stream, from where, and what is refused: from sizes alone."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny import make_tiny

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.header import RANDOM_SHAPES
from tightwire.model.checkpoint.random import RandomReader
from tightwire.model.layout import make_layout
from tightwire.model.open import open_checkpoint
from tightwire.model.prepare import PrepareOptions, prepare
from tightwire.model.weights import EVERYTHING_RESIDENT, WeightPlan
from tightwire.model.weights.formats import WeightFormats, choose_formats
from tightwire.model.weights.residency import WeightSizes
from tightwire.server.config.parallel import ParallelOptions
from tightwire.server.config.serve import EngineOptions, ModelOptions, ServeConfig
from tightwire.server.config.weights import WeightOptions
from tightwire.server.plan import weight_decision
from tightwire.server.plan.gpu_copies import CopyRates
from tightwire.server.plan.memory_budget import NotEnoughMemoryError
from tightwire.server.plan.rank_bytes import MemoryInputs, Pool
from tightwire.server.plan.weight_decision import Files, WeightDecision, as_prepared, decide_weights

MODEL = RANDOM_SHAPES["llama-3.2-1b"]  # 16 layers, 2.3 GiB in bfloat16
PLAIN = WeightFormats()
GIB = 1 << 30


def decide(
    options: WeightOptions,
    gib: float,
    *,
    tp: int = 1,
    device: str = "cpu",
    host_gib: float = 64,
    exist: bool = True,
    engine: EngineOptions | None = None,
    dp: int = 1,
    nodes: int = 1,
    model: LlamaConfig = MODEL,
    formats: WeightFormats = PLAIN,
) -> WeightDecision:
    inputs = MemoryInputs(
        model=model,
        layout=make_layout(model, tp),
        options=engine or EngineOptions(max_num_seqs=8),
        pools=[Pool(name="memory", available_bytes=int(gib * GIB), ranks=range(tp * dp))],
        dtype="bfloat16",
        formats=formats,
        device=device,
        num_replicas=dp,
        host_bytes=int(host_gib * GIB),
    )
    return decide_weights(options, inputs, num_nodes=nodes, files=Files(exist))


def test_auto_keeps_everything_that_fits() -> None:
    assert decide(WeightOptions(), 16).plan == EVERYTHING_RESIDENT
    assert decide(WeightOptions(), 16).notes == ()


@pytest.mark.parametrize("kv_offload", [False, True])
def test_a_small_cache_that_was_asked_for_is_no_reason_to_stream(kv_offload: bool) -> None:
    engine = EngineOptions(kv_cache_memory=32 << 20, kv_offload=kv_offload)
    assert decide(WeightOptions(), 16, engine=engine).plan == EVERYTHING_RESIDENT
    assert decide(WeightOptions(), 2.8, engine=engine).plan.streamed  # there is no room for a larger one


def test_a_model_of_two_layers_stays_however_little_room_is_left() -> None:
    two = replace(MODEL, num_layers=2)
    made = decide(WeightOptions(), 1.22, model=two)
    assert made.plan == EVERYTHING_RESIDENT and made.budget.max_model_len < 2048


def test_auto_shares_layers_between_replicas_where_one_copy_fits_and_one_each_does_not() -> None:
    plan = decide(WeightOptions(), 5.2, dp=2).plan
    assert (plan.source, plan.origin, plan.ranks_per_node) == ("partition", "files", 2)
    assert decide(WeightOptions(), 16, dp=2).plan == EVERYTHING_RESIDENT
    assert decide(WeightOptions(), 3.4, dp=2).plan.source == "stream"  # not one copy
    assert decide(WeightOptions(stream_from="disk"), 5.2, dp=2).plan.source == "stream"
    assert decide(WeightOptions(), 5.2, dp=2, nodes=2).plan.source == "stream"


def test_a_codec_that_would_encode_nothing_is_refused_where_layers_stream() -> None:
    formats = choose_formats(RandomReader(MODEL, 0), MODEL, "int8")
    options = WeightOptions(weight_codec="int4")
    with pytest.raises(ValueError, match=r"int4 has nothing to encode: .* packed \(Q8_0\).* --quantization none"):
        decide(replace(options, weights="stream"), 16, formats=formats)
    assert decide(options, 16, formats=formats).plan == EVERYTHING_RESIDENT


@pytest.mark.parametrize(("dp", "nodes", "per_node"), [(2, 1, 2), (4, 2, 2), (6, 2, 3)])
def test_replicas_of_a_node_share_what_does_not_fit_each(dp: int, nodes: int, per_node: int) -> None:
    made = decide(WeightOptions(weights="partition"), 3.5 * dp, dp=dp, nodes=nodes)
    plan = made.plan
    assert (plan.source, plan.origin) == ("partition", "files")
    assert plan.ranks_per_node == per_node
    [size] = [WeightSizes(MODEL, shard, PLAIN, torch.bfloat16) for shard in make_layout(MODEL, 1).shards]
    assert [rank.weights for rank in made.budget.ranks] == [size.on_device(plan)] * dp
    assert size.kept(plan) == pytest.approx(size.per_pass(plan) / per_node, rel=1e-4)
    assert f"stream from the {per_node} replicas of a node, each with a part of every layer" in made.notes[0]


@pytest.mark.parametrize("parallel", [ParallelOptions(dp=1), ParallelOptions(dp=2, nodes=2)])
def test_partition_wants_replicas_that_share_a_node(parallel: ParallelOptions) -> None:
    with pytest.raises(ValueError, match="--weights partition shares layers among the replicas of a node, and --dp"):
        ServeConfig(parallel=parallel, weights=WeightOptions(weights="partition"))


@pytest.mark.parametrize("option", [{"stream_from": "host"}])
def test_partition_has_no_other_source(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="left out with --weights partition"):
        WeightOptions(weights="partition", **option)


@pytest.mark.parametrize("gib", [1.5, 1.75, 2.0])
@pytest.mark.parametrize("tp", [1, 2])
def test_auto_streams_as_few_layers_as_the_memory_wants(gib: float, tp: int) -> None:
    made = decide(WeightOptions(), gib + 0.5 * tp, tp=tp)
    plan, budget = made.plan, made.budget
    assert plan.source == "stream" and plan.origin == "disk"
    need = sum(rank.fixed + rank.block * budget.num_blocks for rank in budget.ranks)
    assert need <= (gib + 0.5 * tp) * GIB
    fewer = replace_streamed(plan, len(plan.streamed) - 1)
    sizes = [WeightSizes(MODEL, shard, PLAIN, torch.bfloat16) for shard in make_layout(MODEL, tp).shards]
    freed = sum(size.on_device(fewer) - size.on_device(plan) for size in sizes)
    floor = decide(replace(WeightOptions(), weights="stream", stream_layers=16), gib + 0.5 * tp, tp=tp).budget
    left = (gib + 0.5 * tp) * GIB - sum(rank.fixed for rank in budget.ranks) - freed
    assert left < floor.num_blocks * sum(rank.block for rank in floor.ranks)  # one more would take the cache's part
    assert (
        f"{16 - len(plan.streamed)} of 16 layers are resident; {len(plan.streamed)} stream from disk" in made.notes[0]
    )


def test_auto_streams_rather_than_leave_no_context_worth_having() -> None:
    made = decide(WeightOptions(), 2.84)
    with pytest.raises(NotEnoughMemoryError):
        decide(WeightOptions(weights="resident"), 2.24)
    tight = decide(WeightOptions(weights="resident"), 2.84)
    assert tight.budget.max_model_len < 2048 < made.budget.max_model_len
    assert made.plan.streamed


def replace_streamed(plan: WeightPlan, number: int) -> WeightPlan:
    return msgspec.structs.replace(plan, streamed=plan.streamed[:number])


def test_throughput_leaves_more_to_the_cache_and_takes_longer_steps() -> None:
    latency = decide(WeightOptions(), 2.5, engine=EngineOptions())
    throughput = decide(WeightOptions(stream_policy="throughput"), 2.5, engine=EngineOptions())
    assert throughput.budget.num_blocks > latency.budget.num_blocks
    assert len(throughput.plan.streamed) > len(latency.plan.streamed)
    assert (latency.plan.max_parts, throughput.plan.max_parts) == (1, 16)


def test_asked_to_stream_what_fits_it_streams_all_and_warns() -> None:
    made = decide(WeightOptions(weights="stream"), 16)
    assert made.plan.streamed == tuple(range(16))
    assert made.notes[-1].startswith("warning: all weights would fit on the device")
    assert decide(WeightOptions(weights="stream", stream_layers=4), 16).plan.streamed == (2, 6, 10, 14)


def test_a_codec_on_a_cpu_is_said_to_cost_computing_and_what_does_not() -> None:
    options = WeightOptions(weights="stream", weight_codec="int4")
    words = "--quantization int4 in place of --weight-codec int4 stores 5 bits a number"
    assert words in decide(options, 16).notes[1]
    for quiet in (decide(options, 16, device="cuda"), decide(WeightOptions(weights="stream"), 16)):
        assert not any("--quantization" in note for note in quiet.notes)


def test_where_layers_wait() -> None:
    cuda = decide(WeightOptions(), 3, device="cuda")
    assert cuda.plan.origin == "host"
    assert "host memory holds" in cuda.notes[-1]
    assert decide(WeightOptions(), 3, device="cuda", host_gib=1).plan.origin == "disk"
    assert decide(WeightOptions(weight_codec="int4"), 2, host_gib=8).plan.origin == "host"
    assert decide(WeightOptions(weights="stream"), 16, exist=False).plan.origin == "host"


Timed = Callable[[CopyRates | None], list[int]]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    """Sets the rates of copies, and returns the numbers of GPUs that were timed."""

    def set_rates(rates: CopyRates | None) -> list[int]:
        asked: list[int] = []
        found = rates, "" if rates else "out of memory"
        monkeypatch.setattr(weight_decision, "copy_rates", lambda num_gpus: asked.append(num_gpus) or found)
        return asked

    return set_rates


def on_gpus(**options: Any) -> WeightDecision:
    return decide(WeightOptions(), 18, **{"tp": 2, "dp": 4, "device": "cuda"} | options)


@pytest.mark.parametrize(
    ("rates", "source", "reason"),
    [
        (
            CopyRates(20e9, 40e9),
            "partition",
            r"replicas share layers: .* \(40.0 GB/s .* host \(20.0 GB/s\); [0-9]+ cache blocks fit if shared, ",
        ),
        (CopyRates(25e9, 11e9), "stream", "replicas stream their own layers: .* has to be 1.2 times as fast, with 50%"),
        (None, "stream", "warning: replicas stream .* were not timed: out of memory"),
    ],
)
def test_layers_of_gpus_are_shared_if_they_arrive_clearly_faster_from_other_gpus(
    rates: CopyRates | None, source: str, reason: str, timed: Timed
) -> None:
    asked = timed(rates)
    made = on_gpus()
    assert (made.plan.source, asked) == (source, [8])
    assert re.search(reason, made.notes[-1]), made.notes[-1]


def test_layers_of_gpus_are_shared_at_a_gain_of_a_fifth_and_half_the_cache(
    timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(CopyRates(1e12, 1e9))
    alone = on_gpus()
    timed(CopyRates(1e9, 1e12))
    shared = on_gpus()
    [size, *_] = [WeightSizes(MODEL, shard, PLAIN, torch.bfloat16) for shard in make_layout(MODEL, 2).shards]
    least = 1.2 * size.per_pass(shared.plan) * 3 / 4 / size.per_pass(alone.plan)
    kept = shared.budget.num_blocks / alone.budget.num_blocks
    monkeypatch.setattr(weight_decision, "_LEAST_CACHE", kept)
    for factor, source in ((1.01, "partition"), (0.99, "stream")):
        timed(CopyRates(1e9, least * factor * 1e9))
        assert on_gpus().plan.source == source
    timed(CopyRates(1e9, 100e9))
    monkeypatch.setattr(weight_decision, "_LEAST_CACHE", kept + 0.01)
    assert on_gpus().plan.source == "stream"


def test_of_a_cache_on_the_host_the_buffers_on_the_device_are_compared(timed: Timed) -> None:
    timed(CopyRates(1e9, 1e12))
    engine = EngineOptions(max_num_seqs=8, kv_offload=True)
    made = {gib: decide(WeightOptions(), gib, tp=2, dp=4, device="cuda", engine=engine) for gib in (14, 16)}
    assert [each.plan.source for each in made.values()] == ["stream", "partition"], "14 GiB leave less than half"
    for each, words in zip(made.values(), ("{} if not", "; {} cache blocks fit if shared"), strict=True):
        assert each.budget.step_blocks < each.budget.num_blocks
        assert words.format(each.budget.step_blocks) in each.notes[-1]


def test_copies_of_gpus_are_timed_only_where_they_decide(timed: Timed) -> None:
    asked = timed(CopyRates(1e9, 9e9))
    on_nodes = on_gpus(nodes=2)
    assert on_nodes.plan.source == "stream" and "on several nodes copies are not timed" in on_nodes.notes[-1]
    by_disk = on_gpus(host_gib=1)
    assert by_disk.plan.source == "partition" and "would read its own from disk" in by_disk.notes[-1]
    random = on_gpus(host_gib=0.1, exist=False)
    assert random.plan.source == "partition" and "cannot stream its own: random weights" in random.notes[-1]
    assert decide(WeightOptions(), 5, dp=2, device="cuda").plan.source == "stream", "a node does not hold one copy"
    assert decide(WeightOptions(stream_from="host"), 7, dp=2, device="cuda").plan.source == "stream"
    assert not asked


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_replica_of_several_nodes_streams(device: str) -> None:
    assert (
        decide(WeightOptions(), 2.5 if device == "cpu" else 3.6, tp=2, nodes=2, device=device).plan.source == "stream"
    )


@pytest.mark.parametrize(
    ("options", "gib", "host_gib", "exist", "reason"),
    [
        (WeightOptions(weights="resident"), 2, 64, True, "the weights do not fit"),
        (WeightOptions(), 0.5, 64, True, "the weights do not fit"),
        (WeightOptions(weights="stream", stream_layers=2), 16, 64, True, "--stream-layers must be 3 to 16"),
        (WeightOptions(weights="stream", stream_layers=17), 16, 64, True, "--stream-layers must be 3 to 16"),
        (
            WeightOptions(stream_from="host"),
            3,
            1,
            True,
            "--stream-from host: the layers take .* use --stream-from disk",
        ),
        (
            WeightOptions(stream_from="disk"),
            2.7,
            64,
            False,
            "random weights are in no file to stream; `tightwire prep",
        ),
        (
            WeightOptions(),
            1.5,
            64,
            False,
            "(?s)the weights do not fit.*random weights are not in a file; `tightwire prepare` .* --weight-codec int4 keeps",
        ),
        (
            WeightOptions(stream_from="disk", weight_codec="int8"),
            2.7,
            64,
            True,
            "the files are not encoded; `tightwire p",
        ),
    ],
)
def test_an_impossible_placement_is_refused(
    options: WeightOptions, gib: float, host_gib: float, exist: bool, reason: str
) -> None:
    device = "cuda" if options.stream_from == "host" else "cpu"
    with pytest.raises((NotEnoughMemoryError, ValueError), match=reason):
        decide(options, gib, host_gib=host_gib, exist=exist, device=device)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stream_layers": 4}, "--stream-layers must be given only with --weights stream"),
        ({"weights": "resident", "weight_codec": "int4"}, "--weight-codec must be left out with --weights resident"),
        ({"device_memory": 0}, "--device-memory must be at least 1"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        WeightOptions(**options)  # pyright: ignore[reportArgumentType]


def test_a_prepared_folder_settles_what_it_was_made_with(tmp_path: Path) -> None:
    source = open_checkpoint(str(make_tiny(tmp_path / "m", num_hidden_layers=4)))
    prepare(source, tmp_path / "out", PrepareOptions(tp=2, dtype="float32", codec="int8-g64"))
    prepared = open_checkpoint(str(tmp_path / "out")).prepared
    assert prepared is not None
    config = as_prepared(ServeConfig(parallel=ParallelOptions(tp=2)), prepared)
    assert (config.model.dtype, config.weights.weight_codec) == ("float32", "int8")
    resident = ServeConfig(parallel=ParallelOptions(tp=2), weights=WeightOptions(weights="resident"))
    assert as_prepared(resident, prepared).weights.weight_codec == "none"
    for wrong, reason in [
        (ServeConfig(), "split over 2 ranks; give --tp 2 \\(got 1\\)"),
        (ServeConfig(parallel=ParallelOptions(tp=2, tp_split=(2, 1))), "was made with --tp-split none"),
        (
            ServeConfig(parallel=ParallelOptions(tp=2), model=ModelOptions(dtype="bfloat16")),
            "--dtype bfloat16: .* stores float32",
        ),
        (
            ServeConfig(parallel=ParallelOptions(tp=2), model=ModelOptions(quantization="int8")),
            "--quantization int8: .* stores the format it was prepared with",
        ),
        (
            ServeConfig(parallel=ParallelOptions(tp=2), weights=WeightOptions(weight_codec="int4")),
            "--weight-codec int4: .* stores int8",
        ),
    ]:
        with pytest.raises(ValueError, match=reason):
            as_prepared(wrong, prepared)
