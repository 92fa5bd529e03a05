"""Chats as samples: what is learned, how rows are packed, and what is refused with file and line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.small_llama import small_llama
from helpers.training.training_ranks import VOCABULARY
from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as Backend

from tightwire.model.text.tokenizer import END_OF_TURN_ID, byte_backend, with_template
from tightwire.training.data.chats import IGNORED, ChatEncoder, ChatPacker, PairPacker, PromptPacker, Row
from tightwire.training.data.documents import OWN_FILES, DataError, Documents
from tightwire.training.data.sequences import stack

_TOKENIZER = with_template(byte_backend(260))
_END = 257


def _packer(sequence_tokens: int, render: Any = _TOKENIZER.render_chat) -> ChatPacker:
    def encode(text: str) -> list[int]:
        return _TOKENIZER.encode(text, add_special_tokens=False)

    return ChatPacker(ChatEncoder(render, encode, _TOKENIZER.eos_token_ids), sequence_tokens, _END)


def _chat(*turns: str) -> str:
    roles = ("user", "assistant")
    return json.dumps({"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]})


def _learned(row: Row) -> str:
    return _TOKENIZER.decode([token for token in row.targets if token != IGNORED], skip_special_tokens=False)


def test_only_answers_and_the_ends_of_their_turns_are_learned() -> None:
    (row,) = _packer(100)([_chat("Hi", "hello", "And you?", "fine")])

    assert _learned(row) == "hello<|end|>fine<|end|>"
    messages = json.loads(_chat("Hi", "hello", "And you?", "fine"))["messages"]
    sample = _TOKENIZER.encode_chat(messages, add_generation_prompt=False)
    assert row.inputs[: len(sample) - 1] == sample[:-1]
    at = row.targets.index(END_OF_TURN_ID)
    assert row.inputs[at + 1] == END_OF_TURN_ID  # a target is the next input


def test_what_a_template_writes_after_a_turn_is_not_learned() -> None:
    def render(messages: Any, add_generation_prompt: bool) -> str:
        return _TOKENIZER.render_chat(messages, add_generation_prompt).replace("<|end|>", "<|end|>\n")

    (row,) = _packer(60, render)([_chat("Hi", "hello")])

    assert _learned(row) == "hello<|end|>"


@pytest.mark.parametrize(("before", "answer"), [("<a>\n", "H▁H</s>"), ("</s>", "▁H▁H</s>")])
def test_answers_are_learned_with_the_tokens_that_the_model_generates(before: str, answer: str) -> None:
    """SentencePiece's tokenizers write a space before a text, and only there and behind special tokens."""
    characters = ["<unk>", "</s>", *"▁Hi<a>\n", "▁H"]
    backend = Backend(
        models.BPE({text: place for place, text in enumerate(characters)}, [("▁", "H")], unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])

    def render(messages: Any, add_generation_prompt: bool) -> str:
        return "".join(before * (m["role"] == "assistant") + m["content"] + "</s>" for m in messages) + (
            before * add_generation_prompt
        )

    messages = [{"role": role, "content": "H H"} for role in ("user", "assistant") * 40]
    encode = ChatEncoder(render, lambda text: backend.encode(text, add_special_tokens=False).ids, (1,))
    tokens, learned = encode(messages, "here")

    assert tokens == backend.encode(render(messages, False)).ids
    words = [backend.id_to_token(token) or "" for token, own in zip(tokens, learned, strict=True) if own]
    assert "".join(words) == answer * 40


def test_the_tools_of_a_line_are_written_by_the_template_or_refused() -> None:
    def render(messages: Any, add_generation_prompt: bool, tools: Any = None) -> str:
        return (tools[0]["name"] if tools else "") + _TOKENIZER.render_chat(messages, add_generation_prompt)

    line, pair, prompt = (
        json.dumps(json.loads(text) | {"tools": [{"name": "add"}]})
        for text in (_chat("Hi", "hello"), _pair("Hi", "a", "b"), '{"prompt": [{"role": "user", "content": "Hi"}]}')
    )
    encode = _packer(60, render).encode
    (row,), (rows,) = _packer(60, render)([line]), PairPacker(encode, 60, _END)([pair])
    (asked,) = PromptPacker(encode, 60, 8)([prompt])
    for tokens in (row.inputs, rows.inputs, rows.inputs[60:], asked.token_ids):
        assert _TOKENIZER.decode(tokens).startswith("add")
    assert _learned(row) == "hello<|end|>" and asked.columns == {"tools": [{"name": "add"}]}
    for pack, text in ((_packer(60), line), (PromptPacker(_packer(60).encode, 60, 8), prompt)):
        with pytest.raises(
            DataError, match="the model's chat template does not write tools; remove them from the line"
        ):
            list(pack([text]))


def test_samples_are_packed_in_order_and_positions_begin_again() -> None:
    chats = [_chat("a", "b"), _chat("c", "d"), _chat("e", "f" * 20)]
    rows = list(_packer(60)(chats))

    assert [_learned(row) for row in rows] == ["b<|end|>d<|end|>", "f" * 20 + "<|end|>"]
    assert all(len(values) == 60 for row in rows for values in row)
    starts = [at for at, position in enumerate(rows[0].positions) if position == 0]
    assert len(starts) == 3 and starts[1] * 2 == starts[2]  # two samples of the same length, and the rest
    assert set(rows[0].inputs[starts[2] :]) == {_END} and set(rows[0].targets[starts[2] :]) == {IGNORED}


def test_packed_samples_do_not_attend_to_each_other() -> None:
    torch.manual_seed(0)
    model, lengths = small_llama(), (5, 9, 4)
    samples = [torch.randint(0, VOCABULARY, (length,)).tolist() for length in lengths]
    positions = [position for length in lengths for position in range(length)]
    batch = stack([Row([token for sample in samples for token in sample], [0] * 18, positions)])

    packed = model(input_ids=batch.inputs_BS, position_ids=batch.positions_BS, use_cache=False).logits[0]

    for sample, got in zip(samples, packed.split(lengths), strict=True):
        torch.testing.assert_close(got, model(torch.tensor([sample]), use_cache=False).logits[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops}", "is not valid JSON"),
        ("{}", r'has no messages; write \{"messages"'),
        ('{"messages": []}', "has no messages"),
        ('{"messages": ["Hi"]}', "message 0 has role None; known: system, user, assistant, tool"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "message 0 has role 'bot'; known: system, user"),
        ('{"messages": [{"role": "user", "content": null}]}', r"message 0 has no text under content \(got NoneType\)"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "has no message of the assistant, so there is nothing"),
        (_chat("x", "y" * 80), r"has 101 tokens and data.sequence_tokens is 60; raise it to 100 or more"),
    ],
)
def test_bad_chats_are_refused_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{_chat('a', 'b')}\n\n{line}\n")
    documents = Documents(files=(path,), kind="chat")

    with pytest.raises(DataError, match=f"chats.jsonl:3: .*{message}"):
        list(_packer(60)(documents))


def test_a_template_that_rejects_or_rewrites_earlier_messages_is_refused() -> None:
    def trims(messages: Any, add_generation_prompt: bool) -> str:
        last = [*messages[:-1], messages[-1] | {"content": "changed"}] if len(messages) > 2 else messages
        return _TOKENIZER.render_chat(last[1:] if len(messages) > 2 else last, add_generation_prompt)

    with pytest.raises(DataError, match="does not write message 1 as it would be generated; end the chat with it"):
        list(_packer(60, trims)([_chat("a", "b", "c", "d")]))


def test_the_example_has_chats_that_fit_its_rows() -> None:
    rows = list(_packer(400)(Documents(files=OWN_FILES["example-chats"], kind="chat")))

    assert len(rows) == 80
    assert _learned(rows[0]).startswith('{"name": ')


def _pair(prompt: str, chosen: str, rejected: str) -> str:
    messages = {"prompt": ("user", prompt), "chosen": ("assistant", chosen), "rejected": ("assistant", rejected)}
    return json.dumps({key: [{"role": role, "content": text}] for key, (role, text) in messages.items()})


def test_a_preference_is_a_chosen_and_a_rejected_row_of_which_the_answers_are_learned() -> None:
    encode = _packer(40).encode
    value = json.loads(_pair("Hi", "yes", "no"))
    value["prompt"] += [{"role": "assistant", "content": "what?"}, {"role": "user", "content": "say"}]
    (pair,) = PairPacker(encode, 70, _END)([json.dumps(value)])

    chosen, rejected = (Row(*(values[at : at + 70] for values in pair)) for at in (0, 70))
    assert (_learned(chosen), _learned(rejected)) == ("yes<|end|>", "no<|end|>")
    assert len(pair.inputs) == len(pair.targets) == len(pair.positions) == 140
    assert chosen.positions[0] == rejected.positions[0] == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": [], "chosen": []}', r"under prompt, chosen and rejected \(found: prompt, chosen\)"),
        (_pair("a", "b", "b"), "chosen and rejected are the same"),
        (_pair("a", "b", "c").replace("assistant", "user", 1), "has no message of the assistant"),
        (_pair("a", "b", "c" * 90), "data.sequence_tokens is 60"),
    ],
)
def test_bad_preferences_are_refused_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{_pair('a', 'b', 'c')}\n{line}\n")
    with pytest.raises(DataError, match=f"pairs.jsonl:2: .*{message}"):
        list(PairPacker(_packer(60).encode, 60, _END)(Documents(files=(path,), kind="preferences")))


def test_the_example_of_preferences_can_be_read() -> None:
    assert len(list(Documents(files=OWN_FILES["example-preferences"], kind="preferences"))) == 240
