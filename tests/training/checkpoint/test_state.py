"""What is restored of an optimizer: its scalars where torch's optimizer keeps them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tightwire.training.checkpoint.state import RunState, wanted_state


@pytest.mark.parametrize(
    ("options", "device"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")], ids=str
)
def test_step_counts_lie_beside_the_weights_where_the_optimizer_wants_that(
    options: dict[str, Any], device: str
) -> None:
    """The weights are on another device than the host."""
    numbers = torch.empty(4, device="meta")
    shard: Any = SimpleNamespace(name="a", flat_N=numbers, spans=())
    optimizer = SimpleNamespace(defaults=options, state={})
    state = SimpleNamespace(shards=[shard], optimizer=optimizer)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tightwire.training.checkpoint.state.chunks_of", lambda *_: ())
        wanted_state(cast(RunState, state), {"optimizer": {"a": {"step": 7.0}}}, {})
    assert optimizer.state[numbers]["step"].device.type == device
