"""The policy value: which rule counts, what is left after a quarantine, and that it survives the wire."""

import msgspec
import pytest
from helpers.comm.fixed_policy import fixed_policy

from tightwire.comm.policy.rules import Choice, Policy, QuarantinedError, Rule


def choice(*algorithms: str, up_to_bytes: int | None = None) -> Choice:
    return Choice(up_to_bytes=up_to_bytes, algorithms=algorithms, reason="because")


def test_the_first_rule_that_matches_site_phase_and_layer_counts() -> None:
    special, general = (choice("ring"),), (choice("two-shot"),)
    policy = Policy((Rule("o_proj", "prefill", special, layers=(0, 7)), Rule("o_proj", "prefill", general)))
    assert policy.choices("o_proj", 7, "prefill") == special
    assert policy.choices("o_proj", 1, "prefill") == general
    with pytest.raises(ValueError, match="no rule for down_proj of layer 3 in decode"):
        policy.choices("down_proj", 3, "decode")


def test_algorithms_are_named_once_in_order_of_use() -> None:
    choices = (choice("one-shot", "two-shot", up_to_bytes=9), choice("two-shot", "one-shot"))
    assert Policy((Rule("embed", "prefill", choices),)).algorithms == ("one-shot", "two-shot")


def test_a_quarantined_algorithm_is_replaced_by_the_next_best_and_the_reason_says_so() -> None:
    policy = Policy((Rule("o_proj", "decode", (choice("one-shot", "two-shot", "ring"),)),))
    (left,) = policy.without({"one-shot": "off by 3"}).choices("o_proj", 0, "decode")
    assert left.algorithms == ("two-shot", "ring")
    assert "replaces one-shot" in left.reason and "off by 3" in left.reason


def test_bands_that_come_to_the_same_algorithm_are_joined() -> None:
    choices = (choice("one-shot", "two-shot", up_to_bytes=100), choice("two-shot", "one-shot"))
    policy = Policy((Rule("o_proj", "decode", choices),))
    (left,) = policy.without({"one-shot": "wrong"}).choices("o_proj", 0, "decode")
    assert (left.up_to_bytes, left.algorithms) == (None, ("two-shot",))


def test_what_is_not_first_leaves_without_a_trace_in_the_reason() -> None:
    policy = Policy((Rule("o_proj", "decode", (choice("one-shot", "two-shot"),)),))
    (left,) = policy.without({"two-shot": "wrong"}).choices("o_proj", 0, "decode")
    assert (left.algorithms, left.reason) == (("one-shot",), "because")


def test_messages_left_without_an_algorithm_are_refused_by_name() -> None:
    with pytest.raises(QuarantinedError, match=r"prefill messages of embed .* flash-int8: off by 3"):
        fixed_policy("flash-int8").without({"flash-int8": "off by 3"})


def test_it_survives_json() -> None:
    policy = Policy((Rule("o_proj", "prefill", (choice("ring", "native", up_to_bytes=None),), layers=(1, 2)),))
    assert msgspec.json.decode(msgspec.json.encode(policy), type=Policy) == policy
