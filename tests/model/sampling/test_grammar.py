"""Grammars: masks, forced tokens with and without forward passes, grammars that are shared, invalid ones."""

from typing import Any

import pytest
from tiny import banned_ids

from tightwire.model.sampling.grammar import GrammarMasks, grammar_error, make_grammar
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.text.tokenizer import EOS_ID, byte_backend

pytest.importorskip("llguidance")

VOCAB = 280  # fewer than the tokenizer's
SCHEMA = {
    "properties": {"ab": {"enum": ["x", "y"]}},
    "required": ["ab"],
    "additionalProperties": False,
    "type": "object",
}


class Row:
    def __init__(self, grammar: str, **params: Any) -> None:
        self.params = SamplingParams(max_tokens=50, grammar=grammar, **params)
        self.stop_ids = frozenset([EOS_ID])
        self.token_ids = [1, 2, 3]
        self.num_prompt_tokens = 3


def masks() -> GrammarMasks:
    return GrammarMasks(VOCAB, [EOS_ID], byte_backend(300).to_str)


def allowed(grammars: GrammarMasks, row: Row) -> list[int]:
    (banned_V,) = grammars.banned(row)
    assert len(banned_V) == VOCAB
    return [int(id_) for id_ in (~banned_V).nonzero()[0]]


@pytest.mark.parametrize("begins", [False, True])
def test_masks_follow_the_text(begins: bool) -> None:
    grammars, row = masks(), Row(make_grammar("regex", "a[bc]d*"))
    for token, options in zip(b"abd", [b"a", b"bc", b"d"], strict=True):
        if begins:
            grammars.begin([row])
        assert set(allowed(grammars, row)) - {EOS_ID} == set(options)
        row.token_ids.append(token)
    assert allowed(grammars, row) == [ord("d"), EOS_ID]


def answer(row: Row, *, skips: bool) -> tuple[bytes, int]:
    """The text of the largest allowed tokens, and how many of them were chosen from a mask."""
    grammars, num_chosen = masks(), 0
    while (token := allowed(grammars, row)[-1]) != EOS_ID:
        num_chosen += 1
        row.token_ids.append(token)
        row.token_ids += grammars.forced(row) if skips else []
    return bytes(row.token_ids[3:]), num_chosen


def test_a_grammar_whose_masks_take_too_long_breaks() -> None:
    backend = byte_backend(300)
    backend.add_tokens(["a" * length for length in range(2, 40)])
    grammars, row = (
        GrammarMasks(338, [EOS_ID], backend.to_str),
        Row(make_grammar("grammar", 'start: x\nx: x x x | x x | "a" | ')),
    )
    row.token_ids += [ord("a")] * 40
    (banned_V,) = grammars.banned(row)
    assert banned_V.all()


def test_no_more_tokens_are_forced_than_the_answer_may_have() -> None:
    grammars, row = masks(), Row(make_grammar("grammar", 'start: "a" start'))
    row.token_ids.append(ord("a"))
    assert grammars.forced(row) == [ord("a")] * (row.params.max_tokens - 1)


def test_forced_tokens_are_the_same_with_and_without_forward_passes() -> None:
    grammar = make_grammar("json", SCHEMA)
    assert answer(Row(grammar), skips=True) == (b'{"ab": "y"}', 2)
    assert answer(Row(grammar), skips=False) == (b'{"ab": "y"}', 11)


@pytest.mark.parametrize(
    "seen", [{"logprobs": 0}, {"min_tokens": 1}, {"bad_words": banned_ids((5,))}, {"allowed_token_ids": (5,)}], ids=str
)
def test_parameters_that_see_each_token_skip_nothing(seen: dict[str, Any]) -> None:
    grammars, row = masks(), Row(make_grammar("json", SCHEMA), **seen)
    assert grammars.forced(row) == []


def test_sequences_share_a_grammar_and_a_released_one_begins_again() -> None:
    grammars, grammar = masks(), make_grammar("choice", ["ab", "cd"])
    first, second = Row(grammar), Row(grammar)
    grammars.compile(grammar).result()
    first.token_ids.append(ord("a"))
    assert [allowed(grammars, row) for row in (first, second)] == [[ord("b")], [ord("a"), ord("c")]]
    grammars.release(first)
    first.token_ids.pop()
    assert allowed(grammars, first) == [ord("a"), ord("c")]


def test_a_text_that_leaves_its_grammar_has_no_next_token() -> None:
    grammars, row = masks(), Row(make_grammar("choice", ["ab"]))
    row.token_ids += b"ax"
    assert allowed(grammars, row) == []


def test_invalid_grammars_have_a_reason() -> None:
    bad = make_grammar("regex", "a(")
    assert "unclosed group" in (grammar_error(bad) or "")
    with pytest.raises(ValueError, match="unclosed group"):
        masks().compile(bad).result()
    assert grammar_error(make_grammar("regex", "a")) is None


@pytest.mark.parametrize("kind", ["grammar", "json"])
def test_long_chains_of_references_do_not_overflow_the_stack(kind: Any) -> None:
    if kind == "json":
        chain = {f"r{i}": {"allOf": [{"$ref": f"#/$defs/r{i + 1}"}]} for i in range(4000)}
        source: Any = {"$ref": "#/$defs/r0", "$defs": chain | {"r4000": {"type": "string"}}}
    else:
        source = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(10_000)) + 'r10000: "a"'
    grammar = make_grammar(kind, source)
    assert grammar_error(grammar) is None
    assert masks().compile(grammar).result(60)


def test_grammars_that_would_take_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 262144 are possible"):
        make_grammar("choice", ["x" * 300_000])
    with pytest.raises(ValueError, match="GBNF grammar may have"):
        make_grammar("grammar", "root ::= " + " | ".join(['"a"'] * 10_000))
    with pytest.raises(ValueError, match="too big"):
        masks().compile(make_grammar("regex", "a?" * 20_000)).result(60)


@pytest.mark.parametrize(
    ("regex", "matches", "other"),
    [
        (r"\d{2}", "07", "٠٧"),
        (r"\w\W", "a-", "éé"),
        (r"[\d.]\s\S\D", "7 aé", "٧ aa"),
        (r"[^\W\d]\\d", "a\\d", "é\\d"),
    ],
)
def test_classes_of_a_regular_expression_are_ascii(regex: str, matches: str, other: str) -> None:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer(byte_backend(300).to_str())
    for text, fits in ((matches, True), (other, False)):
        matcher = LLMatcher(tokenizer, make_grammar("regex", regex))
        assert (matcher.try_consume_tokens(list(text.encode())) == len(text.encode())) is fits


@pytest.mark.timeout(60)
def test_a_text_that_never_ends_is_searched_once() -> None:
    """For low numbers. A search from each quote would take minutes, in which nothing else runs."""
    assert grammar_error('{"' + '\\"' * 130_000 + "\nstart: /a/\n") is not None
