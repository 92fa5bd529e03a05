"""Requests with grammars in the engine: beside others, preempted, drafted, cancelled while their grammar is compiled."""

import json
import random
from concurrent.futures import Future, wait
from typing import Any

import pytest
from helpers.server.fake_runner import FakeRunner
from helpers.server.made_up_schemas import make_schemas
from jsonschema_rs import validator_for

from tightwire.model.sampling.grammar import GrammarMasks, make_grammar
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.sampler import Sampler
from tightwire.model.text.tokenizer import EOS_ID, byte_backend
from tightwire.server.config.limits import Limits
from tightwire.server.engine.drafts import Drafter
from tightwire.server.engine.engine import Engine
from tightwire.server.engine.request import RequestRules
from tightwire.server.ipc.messages import AddRequest

pytest.importorskip("llguidance")

VOCAB = 300
DRAFTER = Drafter(max_tokens=4, longest=2, shortest=1)
SUFFIX = Drafter(max_tokens=6, longest=8, shortest=1, num_places=8)
SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 4}, "flag": {"type": "boolean"}},
    "required": ["word", "flag"],
    "additionalProperties": False,
}


def make_engine(num_blocks: int = 200, max_model_len: int = 96, **options: Any) -> Engine:
    limits = Limits(
        max_model_len=max_model_len,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        num_blocks=num_blocks,
        block_size=4,
        prefix_cache="all",
    )
    grammars = GrammarMasks(VOCAB, [EOS_ID], byte_backend(VOCAB).to_str)
    return Engine(
        runner=FakeRunner(limits, VOCAB),
        sampler=Sampler(VOCAB, grammars=grammars),
        limits=limits,
        rules=RequestRules(
            vocab_size=VOCAB, max_model_len=max_model_len, eos_token_ids=frozenset([EOS_ID]), has_grammars=True
        ),
        **options,
    )


def run(engine: Engine, *messages: AddRequest) -> dict[str, tuple[list[int], str | None]]:
    """Tokens and finish reason of each request."""
    answers: dict[str, tuple[list[int], str | None]] = {message.id: ([], None) for message in messages}
    for message in messages:
        engine.add(message)
    while engine.has_work():
        for output in engine.step().outputs:
            tokens, _ = answers[output.id]
            answers[output.id] = tokens + output.token_ids, output.finish_reason
    return answers


def request(name: str, grammar: str, **params: Any) -> AddRequest:
    fields: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": hash_of(name), **params}
    return AddRequest(
        id=name, prompt_token_ids=[1, 2, 3, *name.encode()], params=SamplingParams(grammar=grammar, **fields)
    )


def compiled(masks: GrammarMasks, grammar: str, compile: Any = GrammarMasks.compile) -> Any:
    """What `GrammarMasks.compile` returns, once it has ended."""
    (future,), _ = wait([compile(masks, grammar)])
    return future


def hash_of(name: str) -> int:
    return sum(name.encode()) * 7919


MESSAGES = [
    *(request(f"json-{i}", make_grammar("json", SCHEMA)) for i in range(4)),
    request("greedy", make_grammar("json", SCHEMA), temperature=0.0),
    request("scored", make_grammar("json", SCHEMA), logprobs=2),
    request("regex", make_grammar("regex", "(abc){8}"), presence_penalty=1.0),
    request("short", make_grammar("json", SCHEMA), max_tokens=12),
    *(request(f"free-{i}", "", max_tokens=20 + i) for i in range(3)),
]


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[list[int], str | None]]:
    """Each request's answer by itself."""
    return {name: answer for message in MESSAGES for name, answer in run(make_engine(), message).items()}


@pytest.mark.parametrize("options", [{}, {"drafter": DRAFTER}, {"drafter": SUFFIX}, {"plan_ahead": True}], ids=str)
@pytest.mark.parametrize("num_blocks", [200, 30])
def test_a_mixed_load_gives_each_request_the_answer_it_gets_alone(
    num_blocks: int,
    options: dict[str, Any],
    alone: dict[str, tuple[list[int], str | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        GrammarMasks, "compile", compiled
    )  # else the requests could follow each other and need few blocks
    order = random.Random(num_blocks).sample(MESSAGES, len(MESSAGES))
    engine = make_engine(num_blocks, **options)
    assert run(engine, *order) == alone
    assert engine.stats().counters.num_preemptions > 0 or num_blocks == 200
    for name, (tokens, reason) in alone.items():
        if name.startswith(("json", "greedy", "scored")):
            assert reason == "stop" and tokens[-1] == EOS_ID
            assert set(json.loads(bytes(tokens[:-1]))) == {"word", "flag"}
    assert bytes(alone["regex"][0][:-1]) == b"abc" * 8
    assert len(alone["short"][0]) == 12 and alone["short"][1] == "length"


def test_schemas_of_varied_features() -> None:
    """Every answer is valid, whatever the model prefers."""
    schemas = make_schemas(200)[::4]
    messages = [request(f"{i}", make_grammar("json", schema), max_tokens=2000) for i, schema in enumerate(schemas)]
    answers = run(make_engine(num_blocks=4200, max_model_len=2020), *messages)
    backend = byte_backend(VOCAB)
    for i, schema in enumerate(schemas):
        tokens, reason = answers[f"{i}"]
        assert reason == "stop"
        validator_for(schema).validate(json.loads(backend.decode(tokens)))


def test_forced_tokens_need_no_step() -> None:
    engine = make_engine()
    tokens, _ = run(engine, request("regex", make_grammar("regex", "(abc){8}")))["regex"]
    counters = engine.stats().counters
    assert (len(tokens), counters.num_forced_tokens) == (25, 23)
    assert counters.num_generation_tokens == 25 and counters.num_steps == 2


def test_an_invalid_grammar_is_refused() -> None:
    engine = make_engine()
    engine.add(request("bad", make_grammar("regex", "a(")))
    outputs = []
    while engine.has_work():
        outputs += engine.step().outputs
    (output,) = outputs
    assert output.finish_reason == "refused" and "unclosed group" in (output.message or "")


def test_a_request_waits_for_its_grammar_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling: Future[None] = Future()
    monkeypatch.setattr(GrammarMasks, "compile", lambda self, grammar: compiling)
    engine, grammar = make_engine(), make_grammar("choice", ["ab"])
    for message in (request("held", grammar), request("gone", grammar), request("free", "", max_tokens=3)):
        engine.add(message)
    engine.cancel(["gone"])
    ended = [output.id for _ in range(6) for output in engine.step().outputs if output.finish_reason]
    assert sorted(ended) == ["free", "gone"] and engine.has_work()
    assert (engine.stats().total.num_running, engine.stats().total.num_waiting) == (0, 1)
    compiling.set_result(None)
    tokens = [token for _ in range(4) for output in engine.step().outputs for token in output.token_ids]
    assert bytes(tokens[:-1]) == b"ab" and not engine.has_work()


def test_an_engine_without_a_tokenizer_refuses_grammars() -> None:
    rules = RequestRules(vocab_size=VOCAB, max_model_len=96)
    assert "no tokenizer" in (rules.find_problem(request("x", "start: /a/")) or "")
