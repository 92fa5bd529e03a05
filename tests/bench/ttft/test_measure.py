from tightwire.bench.ttft.measure import Arm, make_turns
from tightwire.bench.ttft.proof import Cell

ARMS = [Arm(name=name, algorithm=name, is_default=False, lossless=True, error=0.0) for name in ("a", "b", "c")]


def test_every_round_has_every_cell_and_every_cell_every_arm() -> None:
    cells = [Cell(prompt_len=length, concurrency=count) for length in (16, 64) for count in (1, 4)]
    groups = list(make_turns(cells, ARMS, 5, seed=3))
    for number in range(5):
        own = [turns for turns in groups if turns[0].round == number]
        assert {turns[0].cell for turns in own} == set(cells) and len(own) == 4
    assert all({turn.arm for turn in turns} == set(ARMS) and len(turns) == 3 for turns in groups)
    assert len({tuple(turn.arm for turn in turns) for turns in groups}) > 1, "the order of the arms changes"
    assert groups == list(make_turns(cells, ARMS, 5, seed=3)) != list(make_turns(cells, ARMS, 5, seed=4))
