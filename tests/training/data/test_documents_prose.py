"""The prose that comes with Tightwire is long and clean."""

from tightwire.training.data.documents import english_text


def test_the_projects_text_is_long_clean_prose():
    text = english_text()
    # SmolLM2's tokenizer makes 77 000 tokens of it; prose has four to five characters a token in any such vocabulary.
    assert len(text) > 300_000
    assert text == text.replace("\r", "").replace("\t", "")
    letters = sum(character.isalpha() or character == " " for character in text)
    assert letters / len(text) > 0.9
    assert "Gutenberg" not in text
