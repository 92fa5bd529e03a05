"""A new algorithm is one file and a row of names: with its entry in the registry, ``auto``, its explanation and the self-test know it."""

from collections.abc import Iterator

import pytest
import torch
from harness import run_in_process

from tightwire.comm.all_reduce import make
from tightwire.comm.all_reduce.entry import Entry, Setting, Work
from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.all_reduce.names import NAMES, all_reduce_names, describe_all_reduce_names
from tightwire.comm.all_reduce.one_shot import OneShotAllReduce
from tightwire.comm.all_reduce.self_test import self_test
from tightwire.comm.group.group import Group
from tightwire.comm.policy.choose import Chooser, PolicyRequest
from tightwire.comm.policy.cost import CostModel


class ToyAllReduce(OneShotAllReduce):
    """One-shot under another name, which claims to cost nothing."""

    name = "toy"


ENTRY = Entry(name="toy", make=ToyAllReduce, work=lambda setting, num_bytes: Work(0, 0), preference=50)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for table in (NAMES, make.ALL_REDUCE):
        monkeypatch.setitem(table, "toy", ENTRY)
    yield


def _chooser() -> Chooser:
    setting = Setting(transport="shared-memory", device="cpu", world_size=4, num_nodes=1, dtype="bfloat16")
    return Chooser(PolicyRequest(row_elems=576, max_rows=512, max_decode_rows=64), CostModel(setting))


def test_names_for_the_contract_suite_and_for_error_messages_have_it() -> None:
    assert "toy" in all_reduce_names()
    assert "toy" in describe_all_reduce_names()


def test_auto_takes_it_where_it_is_fastest_and_explains_the_choice() -> None:
    chooser = _chooser()
    assert "toy" in chooser.candidates()
    assert [choice.algorithms[0] for choice in chooser.policy().choices("o_proj", 0, "decode")] == ["toy"]
    verdicts = {verdict.algorithm: verdict for verdict in chooser.verdicts("o_proj", "decode", 1152)}
    assert verdicts["toy"].chosen and verdicts["toy"].why == "fastest lossless"
    assert "times as slow" in verdicts["one-shot"].why


def test_the_self_test_checks_it() -> None:
    def check(group: Group) -> list[bool]:
        made = {"toy": make_all_reduce("toy", group)}
        return [verdict.ok for verdict in self_test(group, made, row_elems=64, max_rows=4, dtype=torch.float32)]

    assert run_in_process(2, check) == [[True], [True]]
