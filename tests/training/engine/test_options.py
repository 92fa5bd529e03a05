"""The engine's options are those of the configuration."""

from dataclasses import fields

import pytest

from tightwire.training.config.tree import ParallelConfig
from tightwire.training.engine.options import EngineOptions


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown codec 'int9'"):
        EngineOptions(gather_codec="int9")
    with pytest.raises(ValueError, match="unknown codec 'packed'"):
        EngineOptions(gather_codec="packed")
    assert EngineOptions(frozen_codec="packed").codecs == []


def test_defaults_are_those_of_the_configuration() -> None:
    engine, parallel = EngineOptions(), ParallelConfig()
    named = [field.name for field in fields(engine) if field.name not in ("sharding", "compute_dtype", "reduce_dtype")]
    assert {name: getattr(parallel, name) for name in named} == {name: getattr(engine, name) for name in named}
