"""Transport, overlap, planning ahead and the dtype of sums are chosen by device and link; impossible ones are refused."""

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.model.tiny_gguf import make_tiny_gguf
from tiny import make_tiny

from tightwire.comm.link.link import parse_link
from tightwire.comm.link.wire import NAMESPACES, USER_SPACE, plan_link
from tightwire.model.open import open_checkpoint
from tightwire.server.config.flags import make_config
from tightwire.server.config.parallel import ParallelOptions
from tightwire.server.config.serve import EngineOptions, ModelOptions
from tightwire.server.plan.setting import (
    address_bytes_left,
    choose_dtype,
    choose_overlap,
    choose_plan_ahead,
    choose_sum_dtype,
    choose_transport,
    decide_setting,
    refuse_early,
    refuse_wrong_model,
)


def test_a_limit_of_addresses_that_libraries_exceed_is_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config({"device": "cpu"})
    monkeypatch.setattr("resource.getrlimit", lambda which: (2 << 30, resource.RLIM_INFINITY))
    with pytest.raises(
        ValueError, match="`ulimit -v` allows a process 2GiB of addresses, .* take 4GiB; give `ulimit -v unl"
    ):
        refuse_early(config)
    monkeypatch.setattr("resource.getrlimit", lambda which: (5 << 30, resource.RLIM_INFINITY))
    refuse_early(config)
    assert address_bytes_left() == 1 << 30


@pytest.mark.parametrize(
    ("options", "overlap"),
    [
        ({"tp": 2}, False),
        ({"tp": 2, "overlap": "on"}, True),
        ({"tp": 2, "link": "100mbit"}, True),
        ({"tp": 2, "link": "100mbit", "overlap": "off"}, False),
        ({"tp": 2, "nodes": 2}, False),  # of one host, so in its memory
        ({}, False),
    ],
)
def test_sums_travel_beside_computing_where_there_is_a_wire(options: dict[str, Any], overlap: bool) -> None:
    assert choose_overlap(ParallelOptions(**options), "cpu") == overlap


@pytest.mark.parametrize(
    ("tp", "device", "why"), [(1, "cpu", "a single rank sums nothing"), (2, "cuda", "these run on CUDA")]
)
def test_impossible_overlap_is_refused(tp: int, device: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"--overlap on is not possible: .*{why}"):
        choose_overlap(ParallelOptions(tp=tp, overlap="on"), device)


@pytest.mark.parametrize(
    ("asked", "device", "ahead"),
    [("auto", "cpu", False), ("auto", "cuda", True), ("on", "cpu", True), ("off", "cuda", False)],
)
def test_steps_are_planned_ahead_where_a_device_computes_beside_the_host(asked: str, device: str, ahead: bool) -> None:
    assert choose_plan_ahead(EngineOptions(plan_ahead=asked), device) == ahead
    assert choose_plan_ahead(EngineOptions(plan_ahead="auto"), device, 2) is False


@pytest.mark.parametrize(
    ("options", "device", "dtype"),
    [
        ({"tp": 2}, "cpu", "float32"),
        ({"tp": 2, "transport": "process-group"}, "cpu", "float32"),
        ({}, "cpu", "float32"),
        ({"tp": 2, "link": "100mbit"}, "cpu", "bfloat16"),
        ({"tp": 2, "nodes": 2}, "cpu", "bfloat16"),
        ({"tp": 2}, "cuda", "bfloat16"),
        ({"tp": 2, "sum_dtype": "float32"}, "cuda", "float32"),
        ({"tp": 2, "sum_dtype": "float16"}, "cpu", "float16"),
    ],
)
def test_sums_are_float32_where_memory_carries_them(options: dict[str, Any], device: str, dtype: str) -> None:
    assert choose_sum_dtype(ParallelOptions(**options), device, "bfloat16") == dtype


def test_nodes_on_an_emulated_wire_use_sockets_unless_gloo_is_requested() -> None:
    link = msgspec.structs.replace(plan_link(parse_link("1gbit"), USER_SPACE), emulation=NAMESPACES)
    for asked, transport in (("auto", "sockets"), ("sockets", "sockets"), ("process-group", "process-group")):
        options = ParallelOptions(tp=2, link="1gbit", transport=asked)
        assert choose_transport(options, "cpu", link) == (transport, "")
        assert choose_transport(replace(options, link=None), "cpu", several_hosts=True) == (transport, "")
    assert choose_transport(ParallelOptions(tp=2), "cuda", several_hosts=True) == ("process-group", "")


def test_coded_sums_are_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_checkpoint(str(make_tiny(tmp_path / "m"))).config
    for options in ({"tp": 2}, {"tp": 2, "transport": "process-group"}):
        with pytest.raises(
            ValueError, match="--sum-dtype coded-bfloat16 codes messages over sockets and a real wire, and"
        ):
            decide_setting(make_config({"device": "cpu", "sum_dtype": "coded-bfloat16", **options}), model)
    between = {"tp": 2, "device": "cpu", "sum_dtype": "coded-bfloat16", "transport": "sockets"}
    setting = decide_setting(make_config(between), model).setting
    assert (setting.transport, setting.dtype) == ("sockets", "bfloat16")
    config = make_config({"tp": 2, "device": "cpu", "sum_dtype": "coded-bfloat16", "link": "1gbit"})
    link = plan_link(parse_link("1gbit"), USER_SPACE)
    with pytest.raises(ValueError, match="a real wire, and these ranks have none"):
        decide_setting(config, model, link)
    real = decide_setting(config, model, msgspec.structs.replace(link, emulation=NAMESPACES)).setting
    assert (real.transport, real.dtype, real.coded) == ("sockets", "bfloat16", True)
    stages = make_config(
        {**between, "tp": 4, "layout": "pipeline", "stages": 2, "transport": "auto", "link": "1gbit", "nodes": 2}
    )
    inside = decide_setting(stages, model, msgspec.structs.replace(link, emulation=NAMESPACES)).setting
    assert not inside.coded, "stages sum in memory"
    monkeypatch.setattr("tightwire.server.plan.setting.available", lambda: False)
    with pytest.raises(ValueError, match="takes compiled kernels, which this host lacks; use --sum-dtype bfloat16"):
        decide_setting(make_config(between), model)


def test_sockets_are_refused_between_gpus_and_a_bad_secret_early(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--transport sockets connects CPU processes"):
        choose_transport(ParallelOptions(tp=2, transport="sockets"), "cuda")
    (tmp_path / "secret").write_text("short")
    options = {"tp": 2, "device": "cpu", "comm_secret_file": f"{tmp_path}/secret"}
    with pytest.raises(
        ValueError, match="--comm-secret-file: the shared secret in .* has 5 bytes and needs at least 16"
    ):
        refuse_early(make_config(options))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tp": 17, "layout": "pipeline"}, "--tp 17: a stage has a layer or more, and the model has 16;"),
        ({"tp": 32, "layout": "hybrid"}, "--tp 32: a stage has a layer or more, and the model has 16;"),
        ({"tp": 32, "layout": "pipeline", "stages": 32}, "--stages 32: a stage has a layer or more"),
        ({"tp": 2, "layout": "hybrid", "kv_offload": True}, "--kv-offload: "),
        ({"tp": 2, "layout": "pipeline", "weights": "stream"}, "--weights stream: "),
    ],
)
def test_what_a_layout_does_not_work_with_is_refused_before_ranks_start(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"does not combine with {named}"):
        refuse_wrong_model(make_config({"model": "random:llama-3.2-1b"} | options))
    refuse_wrong_model(make_config({"model": "random:llama-3.2-1b", "tp": 16, "layout": "pipeline"}))


@pytest.mark.parametrize(
    ("quant", "device", "message"),
    [
        ("F16", "cpu", ""),
        ("Q8_0", "cpu", ""),
        ("Q8_0", "cuda", "sums of packed weights on CUDA need bfloat16"),
        ("BF16", "cpu", "the checkpoint is in bfloat16"),
    ],
)
def test_float16_is_possible_for_files_within_its_range(quant: str, device: str, message: str, tmp_path: Path) -> None:
    model = open_checkpoint(str(make_tiny_gguf(tmp_path / "m.gguf", quant))).config
    options = ModelOptions(model="m", dtype="float16")
    if not message:
        assert choose_dtype(options, model, device) == "float16"
        return
    with pytest.raises(ValueError, match=f"--dtype float16: {message}"):
        choose_dtype(options, model, device)


def test_a_stage_codec_whose_groups_part_rows_is_refused_before_ranks_start(tmp_path: Path) -> None:
    model = str(make_tiny_gguf(tmp_path / "m.gguf", hidden_size=192))
    options = {"model": model, "tp": 2, "layout": "hybrid", "stage_codec": "int8"}
    with pytest.raises(ValueError, match="--stage-codec int8: a row has 192 numbers, .* give int8-g64 or -g32"):
        refuse_wrong_model(make_config(options))
    refuse_wrong_model(make_config(options | {"stage_codec": "int8-g64"}))
