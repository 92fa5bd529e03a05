from typing import Any

import pytest
from fake_openai import FakeServer, running

from tightwire.server.bench.client import BenchClient, Sample
from tightwire.server.bench.serve.workload import Prompt
from tightwire.server.remote import Remote

PROMPT = Prompt(content="four words of prompt", max_tokens=6)


async def measure(fake: FakeServer, prompt: Prompt = PROMPT, *, timeout_s: float = 10.0, **body: Any) -> Sample:
    with running(fake):
        remote = Remote(base=f"{fake.url}/v1", model=fake.model)
        async with BenchClient(remote, timeout_s=timeout_s, extra_body=body) as client:
            return await client.measure(prompt)


async def test_times_are_those_of_the_stream() -> None:
    sample = await measure(FakeServer(first_token_s=0.1, token_s=0.03, cached_tokens=2))

    assert sample.error is None
    assert sample.ttft_s is not None
    assert 0.1 <= sample.ttft_s < 1.0
    assert len(sample.itl_s) == 5
    assert sum(sample.itl_s) > 4 * 0.03  # the first may be read later than it was sent, the last not
    assert sample.e2e_s == pytest.approx(sample.ttft_s + sum(sample.itl_s))
    assert sample.tpot_s == pytest.approx(sum(sample.itl_s) / 5)
    assert (sample.num_prompt, sample.num_generated, sample.num_cached) == (4, 6, 2)
    assert sample.finish_reason == "length"


async def test_the_clock_stops_at_the_first_text_not_at_an_empty_event() -> None:
    sample = await measure(FakeServer(answer=["", "", "", "a while later"], token_s=0.05))

    assert sample.ttft_s is not None
    assert sample.ttft_s >= 0.15
    assert sample.itl_s == []


async def test_separators_of_unicode_do_not_cut_an_event() -> None:
    sample = await measure(FakeServer(answer=["a\u2028b\u0085c\x0b", "d"]))

    assert sample.error is None
    assert len(sample.itl_s) == 1


async def test_the_request_carries_what_was_asked() -> None:
    fake = FakeServer()

    await measure(fake, ignore_eos=True, temperature=0)
    await measure(fake, Prompt(content=[{"role": "user", "content": "Hi"}], max_tokens=2))

    assert fake.bodies[0] == {
        "model": "fake-model",
        "prompt": "four words of prompt",
        "max_tokens": 6,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0,
    }
    assert fake.bodies[1]["messages"] == [{"role": "user", "content": "Hi"}]


async def test_a_usage_of_another_shape_counts_nothing() -> None:
    odd = {"prompt_tokens": "12", "completion_tokens": None, "prompt_tokens_details": [3]}

    sample = await measure(FakeServer(odd_usage=odd), stream_options={"include_usage": True})

    assert sample.error is None
    assert (sample.num_prompt, sample.num_generated, sample.num_cached) == (0, 0, 0)


async def test_without_usage_events_with_text_are_counted() -> None:
    sample = await measure(FakeServer(usage=False))

    assert (sample.usage, sample.num_generated, sample.num_prompt) == (False, 6, 0)


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        ({"refuses": (429, "queue full")}, "HTTP 429: queue full"),
        ({"error_after": 2}, "stream: the engine died"),
        ({"breaks_after": 2}, "the stream broke off after 2 events"),
        ({"first_token_s": 5.0}, "no end of the answer within 0.2 s"),
    ],
)
async def test_what_goes_wrong_is_the_samples_error(behaviour: dict[str, Any], says: str) -> None:
    sample = await measure(FakeServer(**behaviour), timeout_s=0.2 if "first_token_s" in behaviour else 10.0)

    assert says in (sample.error or "")
    assert sample.tpot_s is None


async def test_a_server_that_is_gone_is_an_error_too() -> None:
    async with BenchClient(Remote(base="http://127.0.0.1:9/v1", model="m"), timeout_s=5.0, extra_body={}) as client:
        sample = await client.measure(PROMPT)

    assert (sample.error or "").startswith("connection: ")
