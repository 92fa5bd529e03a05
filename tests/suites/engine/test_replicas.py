"""Several replicas under one engine: the distribution of work, and texts that do not depend on it."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from helpers.server.fake_replicas import FakeReplicas
from helpers.server.fake_runner import greedy_tokens
from helpers.server.local_engine import run_to_end

from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.sampler import Sampler
from tightwire.model.step import ints
from tightwire.server.config.limits import Limits
from tightwire.server.engine.engine import Engine
from tightwire.server.engine.request import RequestRules
from tightwire.server.engine.scheduler import choose_replica
from tightwire.server.ipc.engine_stats import ReplicaLoad
from tightwire.server.ipc.messages import AddRequest, Output

VOCAB = 61
greedy = partial(greedy_tokens, vocab_size=VOCAB)
ROOMY = Limits(max_model_len=96, max_num_seqs=8, max_num_batched_tokens=64, num_blocks=200, block_size=4)


def make(
    limits: Limits = ROOMY, num_replicas: int = 2, policies: Sequence[str] = ("auto",), **options: Any
) -> tuple[Engine, FakeReplicas]:
    replicas = FakeReplicas(limits, num_replicas, VOCAB)
    engine = Engine(
        runner=replicas,
        sampler=Sampler(VOCAB),
        limits=limits,
        rules=RequestRules(vocab_size=VOCAB, max_model_len=limits.max_model_len, policies=policies),
        num_replicas=num_replicas,
        **options,
    )
    return engine, replicas


def request(name: str, prompt: list[int], **changes: Any) -> AddRequest:
    return AddRequest(name, prompt, SamplingParams(**({"max_tokens": 8, "temperature": 0.0} | changes)))


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def prompts_of(number: int, seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 30))] for _ in range(number)]


def test_sequences_are_distributed_and_each_gets_its_own_text() -> None:
    engine, replicas = make()
    prompts = prompts_of(12)
    for number, prompt in enumerate(prompts):
        engine.add(request(str(number), prompt))

    outputs = run_to_end(engine)

    assert [tokens(outputs[str(n)]) for n in range(12)] == [greedy(prompt, 8) for prompt in prompts]
    done = [sum(int(ints(plan.query_lens).sum()) for plan in runner.plans) for runner in replicas.runners]
    assert sum(done) == sum(len(prompt) + 7 for prompt in prompts)
    assert min(done) > 0.6 * max(done)
    stats = engine.stats()
    assert stats.total.num_free_blocks == stats.total.num_blocks == 2 * ROOMY.num_blocks
    assert stats.counters.num_generation_tokens == 12 * 8


def test_draws_and_scores_equal_those_of_one_replica() -> None:
    params = [{"temperature": 1.0, "seed": 7 + n, "logprobs": 2, "prompt_logprobs": 1} for n in range(6)]
    told = []
    for num_replicas in (1, 3):
        engine, _ = make(num_replicas=num_replicas)
        for number, prompt in enumerate(prompts_of(6, seed=2)):
            engine.add(request(str(number), prompt, **params[number]))
        outputs = run_to_end(engine)
        told.append(
            [
                (tokens(own), [output.logprobs for output in own], [output.prompt_logprobs for output in own])
                for own in (outputs[str(n)] for n in range(6))
            ]
        )
    assert told[0] == told[1]


def test_idle_replicas_get_empty_plans_and_no_gather() -> None:
    engine, replicas = make()
    engine.add(request("a", [5, 6, 7]))
    run_to_end(engine)
    assert replicas.runners[1].plans == []
    assert not any(plan.gather_sizes for plans in replicas.steps for plan in plans)


@pytest.mark.parametrize("replica", [0, 1])
def test_a_sequence_can_be_sent_to_a_given_replica(replica: int) -> None:
    engine, replicas = make()
    engine.add(request("a", [5, 6, 7]), replica)
    assert tokens(run_to_end(engine)["a"]) == greedy([5, 6, 7], 8)
    assert [len(runner.plans) for runner in replicas.runners] == [8 if n == replica else 0 for n in range(2)]
    assert [bool(plan.token_ids) for plan in replicas.steps[0]] == [n == replica for n in range(2)]


def test_a_chat_continues_on_the_replica_with_its_prefix() -> None:
    engine, replicas = make()
    first, second = [7] * 24, [8] * 24
    for number, prompt in enumerate((first, second)):
        engine.add(request(str(number), prompt))
    run_to_end(engine)

    engine.add(request("again", [*second, 1, 2]))
    (output, *_) = run_to_end(engine)["again"]

    assert output.num_cached_tokens == 24
    assert replicas.num_rows(1)[-8] == 2  # the prompt's first step
    assert engine.stats().counters.num_prefix_hit_tokens == 24


def test_a_long_prompt_does_not_delay_another_replica() -> None:
    limits = Limits(max_model_len=96, max_num_seqs=2, max_num_batched_tokens=8, num_blocks=60, block_size=4)
    engine, replicas = make(limits)
    engine.add(request("long", [3] * 80, max_tokens=2), 0)
    engine.add(request("short", [5, 6], max_tokens=10), 1)
    seen: list[str] = []
    while engine.has_work():
        seen += [output.id for output in engine.step().outputs for _ in output.token_ids]
    assert seen[:10] == ["short"] * 9 + ["long"] or seen[:10] == ["short"] * 10
    assert len(replicas.steps) == 11


def test_cancelling_frees_the_blocks_of_its_replica_at_once() -> None:
    engine, replicas = make()
    for number in range(4):
        engine.add(request(str(number), [number + 1] * 9, max_tokens=40))
    engine.step()
    assert [load.num_running for load in engine.stats().loads] == [2, 2]

    engine.cancel(["1", "3"])

    idle = ReplicaLoad(num_running=0, num_waiting=0, num_blocks=ROOMY.num_blocks, num_free_blocks=ROOMY.num_blocks)
    assert engine.stats().loads[1] == idle
    outputs = run_to_end(engine)
    assert outputs["1"][-1].finish_reason == "cancelled" and len(tokens(outputs["0"])) == 39  # the first came before
    assert len(replicas.runners[1].plans) == 1


def test_preemption_stays_inside_a_replica() -> None:
    limits = Limits(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=16, num_blocks=9, block_size=4)
    engine, replicas = make(limits)
    prompts = prompts_of(3, seed=5)
    for number, prompt in enumerate(prompts):
        engine.add(request(str(number), prompt[:8], max_tokens=20), 0)
    engine.add(request("other", [1, 2, 3], max_tokens=20), 1)

    outputs = run_to_end(engine)

    assert [tokens(outputs[str(n)]) for n in range(3)] == [greedy(prompt[:8], 20) for prompt in prompts]
    assert engine.stats().counters.num_preemptions > 0
    assert replicas.num_rows(1)[:21] == [3, *[1] * 19, 0]  # which nothing interrupted
    assert all(load.num_free_blocks == limits.num_blocks for load in engine.stats().loads)


def test_policies_take_turns_in_each_replica() -> None:
    engine, replicas = make(policies=("auto", "ring"))
    for replica in range(2):
        engine.add(request(f"own-{replica}", [5, 6]), replica)
    engine.add(AddRequest("other", [7, 8], SamplingParams(max_tokens=8, temperature=0.0), allreduce="ring"), 0)
    outputs = run_to_end(engine)
    assert {plan.policy for plan in replicas.runners[0].plans} == {0, 1}
    assert {plan.policy for plan in replicas.runners[1].plans} == {0}
    assert tokens(outputs["own-1"]) == tokens(outputs["own-0"]) == greedy([5, 6], 8)
    assert len(replicas.runners[1].plans) == 8 and len(replicas.runners[0].plans) == 16


def test_steps_of_several_replicas_are_not_planned_ahead() -> None:
    with pytest.raises(ValueError, match="2 replicas cannot be planned ahead"):
        make(plan_ahead=True)


@pytest.mark.parametrize(
    ("loads", "num_cached", "chosen"),
    [
        ([0, 0], [0, 0], 0),
        ([5, 3], [0, 0], 1),
        ([3, 3, 2], [0, 0, 0], 2),
        ([0, 0], [0, 16], 1),  # nothing to do anywhere: where the prompt is
        ([8, 6], [32, 0], 0),  # as near as may be
        ([9, 6], [32, 0], 1),
        ([1, 0], [512, 0], 1),  # whoever is idle begins, and has the prompt too from then on
        ([8, 7, 7], [16, 16, 0], 1),  # as much of it cached: where there is less to do
        ([100, 90, 300], [0, 16, 4096], 1),
    ],
)
def test_choose_replica(loads: list[int], num_cached: list[int], chosen: int) -> None:
    assert choose_replica(loads, num_cached) == chosen
