"""Refusals before ranks connect: shardings, compressors and numbers of ranks that do not fit, and addresses."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.training.training_runs import make_config

from tightwire.comm.group.topology import Topology
from tightwire.model.checkpoint.errors import ModelError
from tightwire.training.engine.options import engine_options
from tightwire.training.ranks.groups import open_store
from tightwire.training.run.early_checks import find_topology
from tightwire.training.run.setup import find_device, make_packer
from tightwire.training.start.model import build_model, config_of


@pytest.mark.parametrize(
    ("overrides", "ranks", "nodes", "words"),
    [
        (["batch.sequences=9"], 2, 1, "cannot be divided over 2 ranks"),
        (["parallel.sharding=hybrid"], 2, 1, "hybrid needs several nodes, got one"),
        (["parallel.sharding=zero3", "parallel.between.kind=top-k"], 2, 1, "kind=top-k needs replicas"),
        (["parallel.between.kind=top-k"], 1, 1, "kind=top-k needs replicas"),
        (
            ["parallel.sharding=zero3", "parallel.secondary=true"],
            2,
            1,
            "parallel.secondary, .*needs at least two nodes",
        ),
    ],
)
def test_configurations_that_do_not_fit_the_ranks_are_refused(
    tmp_path: Path, overrides: list[str], ranks: int, nodes: int, words: str
) -> None:
    config = make_config(tmp_path, *overrides)
    with pytest.raises(ValueError, match=words):
        engine_options(config)
        config.check_ranks(Topology(0, ranks, num_nodes=nodes))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("parallel={sharding: zero3, gather_codec: int9}", "parallel.gather_codec: unknown codec 'int9'"),
        ("parallel.frozen_codec=int9", "parallel.frozen_codec: unknown codec 'int9'"),
        ("parallel.between={kind: quantized, reduce_codec: int99}", "between.reduce_codec: unknown codec 'int99'"),
        ("parallel.secondary=true", "parallel: .*needs sharding zero3"),
        ("parallel.reduce_across_codec=int4", "parallel: .*needs reduce_path hierarchical"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine_options(make_config(tmp_path, override))


def test_an_invalid_shape_is_named_by_its_configuration_key(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="model.shape: hidden_size=32 is not a multiple of num_attention_heads=3"):
        config_of(make_config(tmp_path, "model.shape.num_attention_heads=3").model)


def test_nodes_come_from_the_launcher_or_the_configuration() -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert find_topology(environment, None).num_nodes == 2
    assert find_topology(environment, 4).num_nodes == 4
    with pytest.raises(ValueError, match="parallel.nodes=3: 4 ranks cannot be on 3 nodes"):
        find_topology(environment, 3)


def test_ranks_without_an_address_are_refused() -> None:
    with pytest.raises(ValueError, match="start the ranks with torchrun"):
        open_store({}, Topology(0, 2), timeout_s=1.0)
    with pytest.raises(ValueError, match="start the ranks with torchrun"):
        open_store({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "65536"}, Topology(0, 2), timeout_s=1.0)
    assert open_store({}, Topology(0, 1), timeout_s=1.0) is not None


def test_an_unusable_address_is_an_error_with_host_and_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(
            ConnectionError, match=f"cannot connect at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}: .*port that is free"
        ):
            open_store({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, Topology(0, 2), timeout_s=1.0)


def test_what_accepts_and_never_answers_is_no_store() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        with pytest.raises(ConnectionError, match=r"no answer in 0\.5 s\. They must name the first rank's machine"):
            open_store(address, Topology(1, 2), timeout_s=0.5)


def test_a_rank_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_device("cpu", Topology(0, 1)) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="with 1 CUDA devices"):
        find_device("cuda", Topology(1, 2))


def test_patterns_of_frozen_parameters_must_match(tmp_path: Path) -> None:
    llama = config_of(make_config(tmp_path).model)
    with pytest.raises(ValueError, match=r"model.frozen: lm_head\* matches no parameter; the names are model.embed"):
        build_model(llama, device=torch.device("cpu"), frozen=["lm_head*"])
    with pytest.raises(ValueError, match="all parameters are frozen"):
        build_model(llama, device=torch.device("cpu"), frozen=["*"])


def test_chats_need_a_model_with_a_chat_template(tmp_path: Path) -> None:
    config = make_config(tmp_path, "data.kind=chat")
    start: Any = SimpleNamespace(name="base", tokenizer=SimpleNamespace(chat_template=None, encode=len))
    with pytest.raises(ValueError, match="data.kind=chat: base has no chat template; start from an instruct model"):
        make_packer(config, start)
