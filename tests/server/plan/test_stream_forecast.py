"""What streaming comes to, in words, whatever of it could be measured."""

import pytest

from tightwire.server.ipc.messages import StreamForecast


def forecast(**known: float) -> str:
    values = {"bytes_per_s": 0.0, "pass_s": 0.0, "decode_s": 0.0, "prompt_s": 0.0, "break_even_rows": 0, **known}
    return StreamForecast(num_layers=3, pass_bytes=3 << 20, **values).describe()  # pyright: ignore[reportArgumentType]


def test_the_longer_of_the_way_and_the_computing_is_forecast() -> None:
    words = forecast(bytes_per_s=1e8, pass_s=0.1, decode_s=0.05, prompt_s=0.5, break_even_rows=4096)
    assert "3MiB a step, received at 100 MB/s" in words
    assert "gets about 10 tokens/s (resident: about 20)" in words
    assert "takes about 0.5 s (resident: about 0.5)" in words
    assert "with about 4096 or more prompt tokens" in words


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"bytes_per_s": 1e8, "pass_s": 0.1, "prompt_s": 0.5}, "gets unknown tokens/s (resident: unknown), the first"),
        ({"bytes_per_s": 1e8, "pass_s": 0.1, "decode_s": 0.1}, "tokens takes unknown s (resident: unknown); with an"),
        ({"decode_s": 0.1, "prompt_s": 0.5}, "gets unknown tokens/s (resident: about 10)"),
        ({}, "with an unknown number of prompt tokens a step"),
    ],
)
def test_what_was_not_measured_is_unknown(known: dict[str, float], words: str) -> None:
    assert words in forecast(**known)
