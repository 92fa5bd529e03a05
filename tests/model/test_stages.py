import pytest

from tightwire.model.stages import StagePlan, divide_layers


@pytest.mark.parametrize(
    ("num_layers", "shares", "layers"),
    [
        (30, (1, 1), ((0, 15), (15, 30))),
        (30, (2, 1), ((0, 20), (20, 30))),
        (5, (1, 1, 1), ((0, 2), (2, 3), (3, 5))),
        (3, (100, 1, 1), ((0, 1), (1, 2), (2, 3))),
    ],
)
def test_layers_are_divided_by_shares_and_none_is_empty(
    num_layers: int, shares: tuple[float, ...], layers: tuple[tuple[int, int], ...]
) -> None:
    plan = divide_layers(num_layers, shares)
    assert plan == StagePlan(layers) and plan.num_stages == len(shares)
    assert [layer for stage in range(len(shares)) for layer in plan.of(stage)] == list(range(num_layers))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(
        ValueError, match="2 layers cannot be divided into 3 stages; give fewer --tp or --layout tensor"
    ):
        divide_layers(2, (1, 1, 1))
