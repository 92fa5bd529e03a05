"""Sizes as people write them."""

import pytest

from tightwire.sizes import aligned, format_bytes, format_count, parse_bytes, parse_memory


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("7B", 7),
        ("2GiB", 2 << 30),
        ("2g", 2 << 30),
        ("1.5 MiB", 3 << 19),
        ("3GB", 3 * 10**9),
        ("512kb", 512_000),
        ("1TiB", 1 << 40),
    ],
)
def test_reads_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "2 XB", "1,5GiB", "1 GiB more"])
def test_refuses_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match="write it as 2GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["8388608TiB", "9" * 400])
def test_refuses_more_than_any_machine_holds(text: str) -> None:
    assert parse_bytes("8388607TiB") == 8388607 << 40
    with pytest.raises(ValueError, match="is more than any machine holds; give less than 8388608TiB"):
        parse_bytes(text)


def test_memory_without_a_unit_is_refused() -> None:
    assert (parse_memory("576KiB"), parse_memory("1048576")) == (576 << 10, 1 << 20)
    for text, size in (("16", "16B"), ("2048", "2KiB")):
        with pytest.raises(ValueError, match=f"'{text}' is {size}, which holds no model; give it a unit, as in 16GiB"):
            parse_memory(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0B"), (1023, "1023B"), (1024, "1KiB"), (1536, "1.5KiB"), (5 << 40, "5TiB")]
)
def test_writes_sizes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("number", "text"), [(999.4, "999"), (999.7, "1k"), (12_345, "12.3k"), (999_600, "1M"), (2_400_000, "2.4M")]
)
def test_counts_have_three_digits(number: float, text: str) -> None:
    assert format_count(number) == text


def test_columns_of_a_table_are_aligned() -> None:
    rows = [("name", "ms", ""), ("a", "1000", "x")]
    assert aligned(rows) == ["name    ms", "a     1000  x"]
    assert aligned(rows, num_left=3) == ["name  ms", "a     1000  x"]
