"""Whole engines over several replicas, ranks as threads: answers to the bit those of one replica, weights in step."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.comm.fixed_policy import fixed_policy
from helpers.server.local_engine import local_engine, run_to_end
from tiny import VARIANTS, make_tiny

from tightwire.comm.policy.rules import Policy
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.weights import WeightPlan
from tightwire.server.engine.drafts import Drafter
from tightwire.server.ipc.engine_stats import EngineStats
from tightwire.server.ipc.messages import AddRequest

_STEM = [72, 101, 108, 108, 111] * 5
_REQUESTS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": ([5, 9, 200], {"temperature": 0.0}),
    "stops": ([3, 17], {"temperature": 0.0, "stop_token_ids": tuple(range(40, 160)), "min_tokens": 4}),
    "long": (list(range(40, 140)), {"temperature": 0.0, "logprobs": 2}),
    **{f"n{index}": (_STEM, {"temperature": 1.0, "seed": index + 1}) for index in range(3)},
    "top-k": ([8, 8], {"temperature": 1.0, "top_k": 9, "seed": 4}),
    "penalized": ([8, 10], {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.8, "max_tokens": 9}),
    "echo": (_STEM[:9], {"temperature": 0.0, "prompt_logprobs": 1, "max_tokens": 3}),
    "scored": (_STEM[:7], {"prompt_logprobs": 0, "max_tokens": 0}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_tiny(tmp_path_factory.mktemp("replicas"), **VARIANTS["odd-heads"])))


def _answers(checkpoint: Checkpoint, **options: Any) -> tuple[dict[str, Any], EngineStats]:
    """What is told of requests of all kinds, but times and what was cached."""
    settings = {"dtype": torch.bfloat16, "max_model_len": 256, "max_num_batched_tokens": 48, "max_num_seqs": 12}
    with local_engine(checkpoint, **(settings | options)) as local:
        for name, (prompt, changes) in _REQUESTS.items():
            params = SamplingParams(**({"max_tokens": 20, "ignore_eos": True} | changes))
            local.engine.add(AddRequest(name, prompt, params))
        outputs = run_to_end(local.engine)
        told = {
            name: (
                [token for output in own for token in output.token_ids],
                [entry for output in own for entry in output.logprobs or []],
                [output.prompt_logprobs for output in own if output.prompt_logprobs],
                own[-1].finish_reason,
            )
            for name, own in outputs.items()
        }
        return told, local.engine.stats()


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (1, 3), (2, 2)])
def test_answers_are_those_of_one_replica_to_the_bit(tp: int, dp: int, checkpoint: Checkpoint) -> None:
    (wanted, _), (told, stats) = (_answers(checkpoint, tp=tp, dp=replicas) for replicas in (1, dp))
    assert told == wanted
    assert stats.total.num_free_blocks == stats.total.num_blocks and len(stats.loads) == dp


def test_answers_with_drafts_and_preemption(checkpoint: Checkpoint) -> None:
    wanted, _ = _answers(checkpoint, tp=2)
    drafter = Drafter(max_tokens=4, longest=3, shortest=1)
    told, stats = _answers(checkpoint, tp=2, dp=2, max_model_len=128, block_size=4, num_blocks=32, drafter=drafter)
    assert told == wanted
    assert stats.counters.num_preemptions > 0 and stats.counters.num_draft_tokens > 0
    assert stats.total.num_free_blocks == stats.total.num_blocks


_STREAMED = WeightPlan(source="stream", origin="host", streamed=(1, 2, 3))


def test_in_lockstep_every_replica_goes_through_the_layers_in_every_step(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path, num_hidden_layers=4)))
    seen: list[Counter[int]] = []
    with local_engine(checkpoint, dp=2, max_model_len=64, weight_plan=_STREAMED) as local:
        for runner in local.runners:
            runner.lockstep = True
            counter: Counter[int] = Counter()
            layer = runner.weights.layer

            def counted(index: int, counter: Counter[int] = counter, layer: Any = layer) -> Any:
                counter[index] += 1
                return layer(index)

            runner.weights.layer = counted  # type: ignore[method-assign]
            seen.append(counter)
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        local.engine.add(AddRequest("first", [1, 2, 3], params), 0)
        run_to_end(local.engine)
        local.engine.add(AddRequest("second", [1, 2, 3], params), 1)
        run_to_end(local.engine)
        num_steps = local.engine.stats().counters.num_steps
    assert num_steps == 10
    assert seen == [Counter(dict.fromkeys(range(4), num_steps))] * 2


def test_without_lockstep_an_idle_replica_touches_no_layer(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path, num_hidden_layers=4)))
    with local_engine(checkpoint, dp=2, max_model_len=64, weight_plan=_STREAMED) as local:

        def refuse(index: int) -> Any:
            raise AssertionError(f"layer {index} of a replica that has nothing to do")

        local.runners[0].weights.layer = refuse  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        local.engine.add(AddRequest("only", [1, 2, 3], params), 1)
        (outputs,) = run_to_end(local.engine).values()
        assert sum(len(output.token_ids) for output in outputs) == 5
        assert [count.op for count in local.groups[0].ledger.counters.counts()] == ["gather_to_root"]


def test_each_replica_may_use_any_policy(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path)))
    # Rows are whole groups, so a row's sum does not depend on what travels beside it.
    arms: dict[str, Policy] = {"own": fixed_policy("one-shot"), "lossy": fixed_policy("flash:int4-g32,int4-g32")}
    texts = []
    for dp in (1, 2):
        with local_engine(checkpoint, tp=2, dp=dp, all_reduce=arms, max_model_len=256) as local:
            for number in range(4):
                params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
                name = ("own", "lossy")[number // 2]
                local.engine.add(AddRequest(str(number), _STEM, params, allreduce=name))
            outputs = run_to_end(local.engine)
            texts.append([[t for output in outputs[str(n)] for t in output.token_ids] for n in range(4)])
    assert texts[0] == texts[1]
    assert texts[0][0] == texts[0][1] != texts[0][2] == texts[0][3]
