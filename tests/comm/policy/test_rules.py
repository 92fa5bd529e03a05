"""The policy value: which rule counts, what is left after a quarantine, and that it survives the wire."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.comm.fixed_policy import fixed_policy

from tightwire.comm.policy.rules import (
    Choice,
    FileRule,
    Policy,
    PolicyFile,
    QuarantinedError,
    Rule,
    apply,
    check_shape,
    read_policy_file,
    world_size_warning,
    write_policy_file,
)


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


_RULES = (
    FileRule(site="o_proj", phase="prefill", algorithm="flash-int4", layers=(3, 1), reason="KL 0.002"),
    FileRule(site="o_proj", phase="prefill", algorithm="flash-int8"),
    FileRule(site="down_proj", phase="decode", algorithm="flash:int8,int8", layers=(0,)),
)
_FILE = PolicyFile(made_for={"num_layers": 4, "hidden_size": 64, "world_size": 2, "text": "some"}, rules=_RULES)


def _written(folder: Path, **changes: Any) -> Path:
    path = folder / "policy.json"
    path.write_text(json.dumps({"schema": "tightwire.comm-policy/1", "made_for": {}, "rules": []} | changes))
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mix.json"
    path.write_text("older")
    write_policy_file(path, _FILE)
    assert read_policy_file(path) == _FILE
    assert [entry.name for entry in tmp_path.iterdir()] == ["mix.json"]


def test_a_rule_that_cannot_be_obeyed_is_not_made() -> None:
    with pytest.raises(ValueError, match=r"unknown all-reduce 'flash-int9'"):
        FileRule(site="o_proj", phase="prefill", algorithm="flash-int9")


def test_the_first_rule_that_matches_counts_and_the_rest_goes_as_without_the_file() -> None:
    policy = apply(fixed_policy("two-shot"), _FILE, "mix.json")

    def chosen(site: str, layer: int, phase: str) -> str:
        (choice,) = policy.choices(site, layer, phase)
        return choice.algorithms[0]

    assert [chosen("o_proj", layer, "prefill") for layer in range(4)] == ["flash-int8", "flash-int4"] * 2
    assert [chosen("down_proj", layer, "decode") for layer in range(2)] == ["flash:int8,int8", "two-shot"]
    others = [("o_proj", "decode"), ("down_proj", "prefill"), ("embed", "prefill"), ("embed", "decode")]
    assert {chosen(site, layer, phase) for site, phase in others for layer in range(4)} == {"two-shot"}
    assert policy.choices("o_proj", 1, "prefill")[0].reason == "policy file mix.json: KL 0.002"
    assert policy.choices("o_proj", 0, "prefill")[0].reason == "policy file mix.json"


def test_rules_that_come_to_no_layer_are_left_out() -> None:
    shadowed = FileRule(site="o_proj", phase="prefill", algorithm="ring", layers=(2,))
    halves = tuple(
        FileRule(site="down_proj", phase="decode", algorithm="ring", layers=layers) for layers in [(0, 1), (1, 2, 3)]
    )
    policy = apply(
        fixed_policy("two-shot"), PolicyFile(made_for=_FILE.made_for, rules=(*_RULES[:2], shadowed, *halves))
    )
    kinds = [(rule.layers, rule.choices[0].algorithms[0]) for rule in policy.rules if rule.site != "embed"]
    assert kinds[:4] == [((1, 3), "flash-int4"), (None, "flash-int8"), ((0, 1), "ring"), ((2, 3), "ring")]
    assert kinds[4:] == [(None, "two-shot")] * 2  # o_proj in decode, down_proj in prefill


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "tightwire.comm-policy/2"}, "this version reads 'tightwire.comm-policy/1'"),
        ({"rules": [{"site": "mlp", "phase": "prefill", "algorithm": "ring"}]}, "Invalid enum value 'mlp'"),
        ({"rules": [{"site": "o_proj", "phase": "prefill"}]}, "missing required field `algorithm`"),
        ({"rules": [{"site": "o_proj", "phase": "decode", "algorithm": "ring", "layer": 1}]}, "unknown field `layer`"),
        ({"rules": [{"site": "o_proj", "phase": "decode", "algorithm": "rign"}]}, r"unknown all-reduce .*rules\[0\]"),
        ({"rules": [{"site": "o_proj", "phase": "decode", "algorithm": "auto"}]}, "leave the rule out"),
        ({"rules": [{"site": "o_proj", "phase": "decode", "algorithm": "ring", "layers": []}]}, "layers is empty"),
        ({"rules": [{"site": "o_proj", "phase": "decode", "algorithm": "ring", "layers": [1, 1]}]}, "each once"),
        ({"made_for": {"num_layers": "30"}}, "made_for.num_layers must be a whole number above 0, got '30'"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        read_policy_file(_written(tmp_path, **changes))
    assert "policy.json" in str(raised.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mix.json cannot be read: No such file"):
        read_policy_file(tmp_path / "mix.json")
    with pytest.raises(
        ValueError, match="Is a directory; give policy:FILE, a file of `tightwire bench quality --write"
    ):
        read_policy_file(Path(""))  # of the name "policy:"
    for content in (b"\xff{", b'{"made_for":{"a":' + b"[" * 100_000):
        (tmp_path / "mix.json").write_bytes(content)
        with pytest.raises(ValueError, match="mix.json is not a policy file"):
            read_policy_file(tmp_path / "mix.json")


def test_another_model_is_refused_and_another_number_of_ranks_a_warning() -> None:
    check_shape(_FILE, "mix.json", {"num_layers": 4, "hidden_size": 64})
    with pytest.raises(ValueError, match=r"mix.json was made for num_layers 4, and this model has 30"):
        check_shape(_FILE, "mix.json", {"num_layers": 30, "hidden_size": 64})
    with pytest.raises(ValueError, match=r"made for hidden_size 64, and this model has 576"):
        check_shape(_FILE, "mix.json", {"num_layers": 4, "hidden_size": 576})
    with pytest.raises(ValueError, match=r"a rule for layer 3, and the model's layers are 0 to 2"):
        check_shape(PolicyFile(rules=_RULES), "mix.json", {"num_layers": 3, "hidden_size": 64})
    assert world_size_warning(_FILE, "mix.json", 2) is None
    assert "made for 2 ranks, not 4" in (world_size_warning(_FILE, "mix.json", 4) or "")
