from dataclasses import replace
from typing import Any

import pytest
from helpers.server.fake_ttft_server import lines

from tightwire.bench.ttft.proof import ArmPolicy, Cell, Proof
from tightwire.comm.ledger.ledger import Count

# Rows of 64 numbers, of which int8 makes one group of 128 in two: odd numbers of rows show the rounding.
PROOF = Proof(num_layers=2, row_elems=64, dtype="bfloat16", step_tokens=5, world_size=2, num_nodes=1)
FLASH = ArmPolicy(lines("flash-int8"))
TWO_SHOT = ArmPolicy(lines("two-shot"))
ALONE, BESIDE = Cell(prompt_len=7, concurrency=1), Cell(prompt_len=7, concurrency=2)


def count(algorithm: str, phase: str, *messages: int, op: str = "all_reduce", extra: int = 0) -> Count:
    """Of messages of so many rows each."""
    sent = sum(PROOF.sent_bytes(algorithm, rows * 128) for rows in messages) + extra
    return Count(op, algorithm, phase, len(messages), sent, sent, 0.1, sum(messages) * 128)


def alone(**changes: Any) -> list[Count]:
    """7 rows in steps of 5, then two of one: the embedding by two-shot, 2 sums in each of 2 layers by flash."""
    wire = {"flash": "flash-int8", "extra": 0} | changes
    return [
        count("two-shot", "prefill", 5, 2),
        count(wire["flash"], "prefill", *[5] * 4, *[2] * 4, extra=wire["extra"]),
        count("two-shot", "decode", *[1] * 10),
        count("two-shot", "prefill", 1, op="all_gather"),  # of logits: not an AllReduce
    ]


def test_totals_of_a_request_alone_are_equal_to_the_byte() -> None:
    def faults(counts: list[Count]) -> list[str]:
        return PROOF.faults(FLASH, ALONE, 3, counts)

    assert faults(alone()) == []
    assert len(faults(alone(extra=1))) == 1 and "flash-int8 in prefill" in faults(alone(extra=1))[0]
    assert len(faults(alone(flash="flash-int4"))) == 2, "one that ran, and one that did not"
    assert "not used" in faults(alone()[:1])[0]


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ((5, 5, 4), None),
        ((5, 5, 2, 2), None),  # other steps, the same rows
        ((5, 5, 3), "expected"),
    ],
)
def test_requests_beside_each_other_are_held_to_rows(messages: tuple[int, ...], fault: str | None) -> None:
    counts = [
        count("two-shot", "prefill", 5, 5, 4),
        count("flash-int8", "prefill", *messages * 4),
        count("two-shot", "decode", *[2] * 10),
    ]
    found = PROOF.faults(FLASH, BESIDE, 3, counts)
    assert (found == []) if fault is None else all(fault in each for each in found) and found


def test_one_that_the_policy_does_not_name_is_found_beside_others_too() -> None:
    counts = [count("two-shot", "prefill", *[5, 5, 4] * 5), count("ring", "decode", *[2] * 10)]
    assert "ring ran in decode" in PROOF.faults(TWO_SHOT, BESIDE, 3, counts)[0]
    counts[1] = count("two-shot", "decode", *[2] * 10)
    assert PROOF.faults(TWO_SHOT, BESIDE, 3, counts) == []


def test_policy_by_layer_and_size() -> None:
    policy = ArmPolicy(
        [
            {"site": "o_proj", "phase": "prefill", "layers": [1], "up_to_bytes": None, "algorithm": "flash-int4"},
            {"site": "o_proj", "phase": "prefill", "layers": None, "up_to_bytes": 1000, "algorithm": "one-shot"},
            {"site": "o_proj", "phase": "prefill", "layers": None, "up_to_bytes": None, "algorithm": "two-shot"},
        ]
    )
    assert policy.algorithm("o_proj", 1, "prefill", 10) == "flash-int4"
    assert policy.algorithm("o_proj", 0, "prefill", 1000) == "one-shot"
    assert policy.algorithm("o_proj", 0, "prefill", 1001) == "two-shot"
    with pytest.raises(ValueError, match="no AllReduce for down_proj of layer 0"):
        policy.algorithm("down_proj", 0, "prefill", 10)


def test_where_halves_take_turns_each_has_messages_of_its_own() -> None:
    proof = replace(PROOF, num_layers=1, step_tokens=150, overlap=True)
    messages = list(proof.messages(TWO_SHOT, 190, 2))
    # 150 rows are cut at 64; the other 40, and the generated one, are not worth it.
    assert [num_bytes // 128 for _, _, num_bytes in messages] == [64] * 3 + [86] * 3 + [40] * 3 + [1] * 3
