from tightwire.bench.ttft.plan import Arm, arm_names, make_blocks, make_cells

ARMS = [Arm(name=name, algorithm=name, own=False, lossless=True, error=0.0) for name in ("a", "b", "c")]


def test_every_block_has_every_arm_and_every_round_every_cell() -> None:
    cells = make_cells((16, 64), (1, 4))
    blocks = list(make_blocks(cells, ARMS, 5, seed=3))
    for number in range(5):
        own = [block for block in blocks if block.round == number]
        assert {block.cell for block in own} == set(cells) and len(own) == 4
    assert all(set(block.arms) == set(ARMS) and len(block.arms) == 3 for block in blocks)
    assert len({block.arms for block in blocks}) > 1, "the order within a block changes"
    assert blocks == list(make_blocks(cells, ARMS, 5, seed=3)) != list(make_blocks(cells, ARMS, 5, seed=4))


def test_one_that_is_there_twice_gets_a_name_of_its_own() -> None:
    assert arm_names(["ring", "two-shot", "ring"]) == ["ring", "two-shot", "ring#2"]
