"""The generated part of docs/models.md: it is current, and follows the tests' parametrizations."""

import model_table
import pytest

from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS
from tightwire.model.families import FAMILIES


def test_the_page_is_current() -> None:
    assert model_table.current() == model_table.render(), "run `python tools/model_table.py`"


def test_every_family_and_every_format_has_a_row() -> None:
    rows = [line.split("|")[1:] for line in model_table.render().splitlines() if line.startswith("| ")]
    shown = {name: row[-2].strip() for row in rows for name in row[0].strip().split(", ")}
    for family in FAMILIES:
        assert shown[family.names.name].startswith("float32 on 1 to 8 ranks; bfloat16, float16 on 1 to 3 ranks")
    for name in PACKED_FORMATS:
        assert shown[name] == "float32 on 1 to 3 ranks; bfloat16 on 1 to 3 ranks; int8 activations on 1 to 3 ranks"
    assert "GGUF" in shown["Gemma 3"] and "GGUF" not in shown["Ministral"]  # whose files say Llama
    assert "KV cache in int8" in shown["Qwen2"] and "KV cache in int8" not in shown["Qwen3"]


def test_a_test_that_was_renamed_is_named() -> None:
    with pytest.raises(ValueError, match=r"test_families.py has no test_gone; tools/model_table.py names it"):
        model_table.parameters_of("tests/model/test_families.py", "test_gone")
