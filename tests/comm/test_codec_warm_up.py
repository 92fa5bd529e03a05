"""What is compiled before ranks meet: both legs of each quantized algorithm, once each, and nothing for exact ones."""

import pytest
import torch

from tightwire.comm.codec import Codec
from tightwire.comm.codec_warm_up import warm_up_codecs
from tightwire.comm.policy import Choice, Policy, Rule


def policy(*names: str) -> Policy:
    return Policy((Rule("o_proj", "prefill", (Choice(None, names, ""),)),))


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(leg, codec) of every encode and decode."""
    calls: list[tuple[str, str]] = []
    encode, decode = Codec.encode, Codec.decode

    def counted_encode(self: Codec, x_N: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(("encode", self.name))
        return encode(self, x_N, out)

    def counted_decode(
        self: Codec, buf: torch.Tensor, num_elems: int, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        calls.append(("decode", self.name))
        return decode(self, buf, num_elems, dtype, out)

    monkeypatch.setattr(Codec, "encode", counted_encode)
    monkeypatch.setattr(Codec, "decode", counted_decode)
    return calls


def test_each_pair_of_codecs_goes_through_once(used: list[tuple[str, str]]) -> None:
    names = ("one-shot", "flash-int8", "flash:int8,int8", "flash:int4-g64,int8", "hierarchical:int8")
    warm_up_codecs(policy(*names), 576, torch.bfloat16, torch.device("cpu"))
    assert used == [("encode", "int8"), ("decode", "int8"), ("encode", "int4-g64"), ("decode", "int8")]


def test_exact_algorithms_need_nothing(used: list[tuple[str, str]]) -> None:
    warm_up_codecs(policy("auto", "ring", "hierarchical", "flash:none,none"), 64, torch.float32, torch.device("cpu"))
    assert used == []


def test_one_exact_leg_is_no_obstacle() -> None:
    for name in ("flash:none,int8", "flash:int8,none"):
        warm_up_codecs(policy(name), 100, torch.float16, torch.device("cpu"))
