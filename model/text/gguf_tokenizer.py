"""Reads a tokenizer from GGUF metadata: byte-level BPE (``gpt2``) or SentencePiece BPE (``llama``)."""

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError, naming
from tightwire.model.checkpoint.gguf import GgufFile
from tightwire.model.text.tokenizer import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"

# Splits of text into words before BPE. Source: tokenizer.json of Meta-Llama-3-8B, Qwen2-7B, Mistral-Nemo and Phi-4-mini.
_WORD_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_LLAMA3_REGEX = _WORD_REGEX.replace("DIGITS", r"\p{N}{1,3}")
_QWEN_REGEX = _WORD_REGEX.replace("DIGITS", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REGEX = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+ENDING|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*ENDING|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_REGEX = _CASED_REGEX.replace("ENDING", "").replace("DIGITS", r"\p{N}")
_GPT4O_REGEX = _CASED_REGEX.replace("ENDING", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", r"\p{N}{1,3}")


def _split_by(regex: str) -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Split(Regex(regex), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_LLAMA3_NAMES = ("llama-bpe", "llama-v3", "llama3", "pixtral", "falcon3")
# Keys: ``tokenizer.ggml.pre``, llama.cpp's name of the pre-tokenizer.
_WORDS: dict[str, pre_tokenizers.PreTokenizer] = {
    **dict.fromkeys(("default", "gpt-2", "olmo"), _GPT2),
    **dict.fromkeys(
        ("smollm", "refact", "starcoder"),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
    ),
    **dict.fromkeys((*_LLAMA3_NAMES, "smaug-bpe", "dbrx"), _split_by(_LLAMA3_REGEX)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _split_by(_QWEN_REGEX)),
    "tekken": _split_by(_TEKKEN_REGEX),
    "gpt-4o": _split_by(_GPT4O_REGEX),
}
_WITH_BOS = (*_LLAMA3_NAMES, "tekken")  # if the file does not say
_WHOLE_WORDS = (*_WITH_BOS, "smaug-bpe")  # a word that is a token is not merged from its parts
_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3 strips spaces after its other tokens, which files do not say
_NORMALIZED = ("qwen2", "deepseek-r1-qwen")  # to NFC


def tokenizer_from_gguf(file: GgufFile, config: LlamaConfig) -> Tokenizer:
    """Build the tokenizer; raises ModelError for an unsupported tokenizer model or pre-tokenizer, or damaged keys."""
    damage = "its tokenizer is damaged (tokenizer.ggml tokens, merges or types)"
    with naming(file.path, damage, Exception):  # the library raises no narrower type
        return _tokenizer_from_gguf(file, config)


def _tokenizer_from_gguf(file: GgufFile, config: LlamaConfig) -> Tokenizer:
    tokens: list[str] = file.get("tokenizer.ggml.tokens", [])
    if not tokens:
        raise ModelError("has no tokenizer (tokenizer.ggml.tokens is missing)")
    types: list[int] = file.get("tokenizer.ggml.token_type", [])
    template, tools = (file.get(f"tokenizer.chat_template{name}") for name in ("", ".tool_use"))
    if len(tokens) > config.vocab_size or len(types) not in (0, len(tokens)):
        raise ModelError(
            f"has {len(tokens)} tokens with {len(types)} types in its tokenizer, and an embedding of {config.vocab_size}"
        )
    if wrong := [each for each in (template, tools) if not isinstance(each, str | None)]:
        raise ModelError(f"tokenizer.chat_template is {wrong[0]!r:.60}, and should be text")
    kind = file.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = _byte_level(file, tokens)
    elif kind == "llama":
        backend = _sentencepiece(file, tokens)
    else:
        raise ModelError(f"tokenizer model {kind!r} is not supported; supported: gpt2, llama")
    _add_special(backend, tokens, types, strips=file.arch == "phi3" and kind == "llama")
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    special_tokens = {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}
    _add_bos_and_eos(backend, file, special_tokens)
    return Tokenizer(
        backend,
        chat_template=template,
        tool_template=tools,
        template_origin=str(file.path),
        special_tokens=special_tokens,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
    )


def _byte_level(file: GgufFile, tokens: list[str]) -> Backend:
    pre_tokenizer = file.get("tokenizer.ggml.pre", "default")
    if pre_tokenizer not in _WORDS:
        raise ModelError(f"pre-tokenizer {pre_tokenizer!r} is not supported; supported: {', '.join(sorted(_WORDS))}")
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", [])]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre_tokenizer in _WHOLE_WORDS))
    if pre_tokenizer in _NORMALIZED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _WORDS[pre_tokenizer]
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Backend:
    scores: list[float] = file.get("tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise ModelError(f"{len(tokens)} tokens but {len(scores)} scores in its tokenizer")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = file.get("tokenizer.ggml.unknown_token_id", 0)
    merges = _merges_from_scores(vocab, scores)
    backend = Backend(models.BPE(vocab, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    prefix_space = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    to_spaces = normalizers.Replace(" ", _SPACE)
    # The space precedes every run of text, also after a special token, as in Llama 2's training and llama.cpp.
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_spaces]) if prefix_space else to_spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix_space else steps)
    return backend


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return merges by score, with ties as in ``generate_merges`` of transformers' SentencePiece converter."""
    merges: list[tuple[str, str]] = []
    for piece in sorted(vocab, key=lambda each: scores[vocab[each]], reverse=True):
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return merges


def _add_special(backend: Backend, tokens: list[str], types: list[int], *, strips: bool) -> None:
    """Add control tokens, which decoding omits, and user-defined ones, text never split. ``strips``: spaces after them."""
    for kind in (_CONTROL, _UNKNOWN, _USER_DEFINED):
        chosen = (token for token, own in zip(tokens, types, strict=False) if own == kind)
        like = {"special": kind != _USER_DEFINED, "normalized": False}
        backend.add_tokens([AddedToken(token, **like, rstrip=strips and token not in _UNSTRIPPED) for token in chosen])


def _add_bos_and_eos(backend: Backend, file: GgufFile, special_tokens: dict[str, str]) -> None:
    """Set the tokens that ``encode(..., add_special_tokens=True)`` adds; missing keys get llama.cpp's defaults."""
    is_llama2 = file.get("tokenizer.ggml.model") == "llama"
    add_bos = file.get("tokenizer.ggml.add_bos_token", is_llama2 or file.get("tokenizer.ggml.pre") in _WITH_BOS)
    add_eos = file.get("tokenizer.ggml.add_eos_token", False)
    bos = special_tokens.get("bos_token") if add_bos else None
    eos = special_tokens.get("eos_token") if add_eos else None
    used = {text: backend.token_to_id(text) for text in (bos, eos) if text is not None}
    missing = [text for text, token_id in used.items() if token_id is None]
    if missing:
        raise ModelError(f"the tokenizer should add {', '.join(missing)} to texts, but has no such token")
    template = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(text, token_id) for text, token_id in used.items() if token_id is not None]
    )
