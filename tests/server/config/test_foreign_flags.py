"""Flags of vLLM and llama.cpp: each entry names a flag that exists here, and every verb says it."""

import pytest

from tightwire.__main__ import main
from tightwire.server.config.foreign_flags import OWNERS
from tightwire.server.config.serve import option_fields

# --max-tokens, --temperature: `generate` and `chat`; --system: `chat`.
OURS = {"--" + name.replace("_", "-") for name in option_fields()} | {"--max-tokens", "--temperature", "--system"}


def test_each_of_our_names_exists_and_is_not_theirs() -> None:
    for table in OWNERS.values():
        names = {text.replace("--no-", "--") for text in table.values() if text.startswith("-")}
        assert names <= OURS and not OURS & set(" ".join(table).split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--tensor-parallel-size", "2"], "vLLM's --tensor-parallel-size is --tp"),
        (["serve", "-tp=2"], "vLLM's -tp is --tp"),
        (["serve", "--gpu-memory-utilization", "0.9"], "which is vLLM's; give bytes instead: --device-memory 20GiB"),
        (["serve", "-ctk", "q8_0"], "which is llama.cpp's; use --kv-cache-dtype"),
        (["serve", "--speculative-model", "m"], "which is vLLM's; use --speculation draft --draft-model MODEL"),
        (["serve", "--tool-call-parser", "hermes"], "which is vLLM's; leave it out: calls are found"),
        (
            ["serve", "--reasoning-parser=qwen3"],
            "which is vLLM's; leave it out: what a model thinks is part of the content",
        ),
        (["serve", "-hf", "owner/repo"], "llama.cpp's -hf is --model"),
        (["serve", "-c", "4096"], "llama.cpp's -c is --max-model-len"),
        (["generate", "hi", "-n", "3"], "llama.cpp's -n is --max-tokens"),
        (["chat", "--ctx-size", "9"], "llama.cpp's --ctx-size is --max-model-len of `tightwire serve`"),
        (["generate", "hi", "--port", "1"], "unknown argument '--port'; it is a flag of `tightwire serve`"),
        (["serve", "--max-seqs", "3"], "did you mean '--max-num-seqs'?"),
        (["serve", "--swim"], "unknown argument '--swim'; `tightwire serve --help` lists the flags"),
    ],
)
def test_a_flag_of_another_program_is_answered_with_ours(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2 and words in capsys.readouterr().err
