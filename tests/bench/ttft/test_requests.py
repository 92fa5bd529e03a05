import asyncio
import json

import httpx
import pytest

from tightwire.bench.ttft.proof import Cell
from tightwire.bench.ttft.requests import Arm, PromptMaker, make_turns
from tightwire.server.cli.remote import Remote, RemoteError

REMOTE = Remote(base="http://server/v1", model="tiny")
BEGIN = 0  # a token that the tokenizer adds


def letters(request: httpx.Request) -> httpx.Response:
    """A token for each letter, except that a text that begins with an x loses it; and one in front of all."""
    body = json.loads(request.content)
    if request.url.path == "/detokenize":
        return httpx.Response(200, json={"prompt": "".join(map(chr, body["tokens"]))})
    ids = [ord(letter) for letter in body["prompt"].removeprefix("x")]
    return httpx.Response(200, json={"tokens": [BEGIN, *ids] if body["add_special_tokens"] else ids})


def take(text: str, lengths: list[int], answer: httpx.MockTransport | None = None) -> list[tuple[str, tuple[int, ...]]]:
    async def run() -> list[tuple[str, tuple[int, ...]]]:
        async with httpx.AsyncClient(transport=answer or httpx.MockTransport(letters)) as http:
            prompts = PromptMaker(http, REMOTE, seed=1)
            await prompts.open(text)
            return [(prompt.text, prompt.token_ids) for prompt in [await prompts.take(length) for length in lengths]]

    return asyncio.run(run())


def test_prompts_have_exactly_as_many_tokens_and_begin_at_unlike_places() -> None:
    text = "".join(chr(100 + i) for i in range(20)) + "x" + "".join(chr(200 + i) for i in range(400))
    prompts = take(text, [9] * 150)
    assert all(len(ids) == 9 and ids[0] == BEGIN and len(text) == 8 for text, ids in prompts)
    assert len({text[0] for text, _ in prompts}) == 150
    assert not any(text.startswith("x") for text, _ in prompts)


def test_a_text_that_is_used_up_says_so() -> None:
    with pytest.raises(ValueError, match="no unused start left"):
        take("abcdefgh", [5] * 9)


def test_a_length_that_no_passage_comes_to_is_given_up() -> None:
    def doubling(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/detokenize":
            return httpx.Response(200, json={"prompt": "".join(map(chr, body["tokens"]))})
        ids = [ord(letter) for letter in body["prompt"]]
        return httpx.Response(200, json={"tokens": ids * 2 if body["add_special_tokens"] and len(ids) != 6 else ids})

    with pytest.raises(RemoteError, match="none of 200 passages has 5 tokens"):
        take("abcdefgh" * 40, [5], httpx.MockTransport(doubling))


def test_a_length_that_special_tokens_fill_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves no room for text"):
        take("abc", [1])


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
