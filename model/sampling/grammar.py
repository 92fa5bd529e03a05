"""Follows the grammars of constrained sequences with llguidance, and computes which tokens each may continue with.

A mask needs the tokens so far but no logits, so a host thread computes it while the forward pass runs. Text that a grammar
leaves no choice about has one spelling, the tokenizer's own, so it can be appended without a forward pass.

llguidance is imported, and its copy of the tokenizer is built, with the first grammar (about a second).
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from tightwire.model.sampling.parameters import SamplingRow

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

_MAX_COMPILED = 64  # grammars kept for later requests
# llguidance follows references by recursion, and a stack overflow ends the process: 3000 rules in a chain need 8 MiB.
# At most 0.5 KiB for each character of a grammar was measured; here it is 2 KiB. Untouched pages of a stack take no memory.
MAX_GRAMMAR_CHARS = 256 << 10
_STACK_BYTES = 512 << 20
_MAX_GBNF_CHARS = 32 << 10  # the conversion to Lark is Python, and takes time with the square of the number of rules
# Fuel: the size of all regular expressions; 5000 enum values have 60,000, and compiling a larger one may take minutes. Items: the
# parser's work for a token or a mask, for which all requests wait. With the library's 50,000, ambiguous grammars take seconds.
_LIMITS: Any = {"initial_lexer_fuel": 80_000, "step_max_items": 10_000, "verbose_errors": False}
# llguidance 1.7.6 reads such numbers as the integer -2^63, follows a recursion without end, and ends the process.
_LOWEST = -(2.0**63 - 1024)
_NEGATIVE = re.compile(r"-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_ASCII_CLASSES = {"d": "[0-9]", "w": "[0-9A-Za-z_]", "s": r"[\t-\r ]"}
_ASCII_CLASSES |= {name.upper(): "[^" + ascii_class[1:] for name, ascii_class in _ASCII_CLASSES.items()}
_stack_lock = threading.Lock()
# Separators as json.dumps writes them: most training data has them, and no model can continue with spaces for ever.
_JSON_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def make_grammar(kind: Literal["json", "regex", "choice", "grammar"], source: Any) -> str:
    """Return the text of the grammar of all texts that ``source`` allows.

    ``source``: a JSON schema, a regular expression, a list of texts, or a grammar in Lark's or GBNF's notation. In a
    regular expression ``\\d``, ``\\w`` and ``\\s`` are ASCII. ValueError: a grammar that is too long, or a GBNF grammar
    that cannot be read. ImportError: llguidance is not installed.
    """
    from llguidance import LLMatcher, grammar_from

    if kind == "json":
        grammar = LLMatcher.grammar_from_json_schema(source, _JSON_OPTIONS)
    elif kind == "grammar" and "::=" not in source:  # llguidance knows Lark's notation by "start:" alone, not "?start:"
        grammar = LLMatcher.grammar_from_lark(source)
    elif kind == "grammar" and len(source) > _MAX_GBNF_CHARS:
        raise ValueError(f"a GBNF grammar may have {_MAX_GBNF_CHARS} characters, not {len(source)}; use Lark's")
    else:
        if kind == "regex":  # in Rust's syntax classes have the digits, letters and spaces of all scripts
            source = re.sub(r"\\(.)", lambda escape: _ASCII_CLASSES.get(escape[1], escape[0]), source, flags=re.DOTALL)
        grammar = grammar_from(kind, source)
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"it has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are possible")
    return grammar


def grammar_error(grammar: str) -> str | None:
    """Return what is wrong with a grammar, as far as can be told without the tokenizer; None: nothing."""
    from llguidance import LLMatcher

    schemas = grammar if "%json" in grammar else ""
    if grammar.startswith("{"):  # a JSON schema or a regular expression, as JSON; digits in its texts are no numbers
        schemas = re.sub(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', "", grammar, flags=re.DOTALL)
    for number in _NEGATIVE.findall(schemas):
        if float(number) <= _LOWEST:
            return f"it has the number {number[:40]}, which is too low; give numbers above {_LOWEST:.0f}"
    is_error, messages = _with_large_stack(lambda: LLMatcher.validate_grammar_with_warnings(grammar))
    return re.sub(r"Enable 'coerce_one_of'.*", "Use anyOf", messages[0]) if is_error else None


def _with_large_stack(work: Callable[[], T]) -> T:
    """Return what ``work`` returns in a thread of its own, which takes about 0.1 ms."""
    with ThreadPoolExecutor(1, "grammar") as thread:
        with _stack_lock:
            usual = threading.stack_size(_STACK_BYTES)
            try:
                future = thread.submit(work)
            finally:
                threading.stack_size(usual)
        return future.result()


class GrammarMasks:
    """The grammars of live sequences; sequences with the same grammar share its compiled form.

    Cost per row and step: about 50 us on the host thread, and 2 V bytes.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], tokenizer_json: Callable[[], str]) -> None:
        """``tokenizer_json``: the content of tokenizer.json, called with the first grammar."""
        self._vocab_size, self._eos_token_ids, self._tokenizer_json = vocab_size, list(eos_token_ids), tokenizer_json
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._matchers: dict[int, _RowMatcher] = {}  # by id() of the row
        self._mask_thread = ThreadPoolExecutor(1, "grammar mask")
        self._compile_threads = ThreadPoolExecutor(2, "grammar compile")

    def compile(self, grammar: str) -> "Future[LLMatcher]":
        """Compile on a host thread, for the rows to come. The future's ValueError says what is wrong with the grammar."""
        return self._compile_threads.submit(self._matcher, grammar)

    def begin(self, rows: Sequence[SamplingRow]) -> None:
        """Start to compute the masks of these rows' next tokens."""
        for row in rows:
            matcher = self._matcher_of(row)
            num_tokens = len(row.token_ids)
            matcher.next_mask = num_tokens, self._mask_thread.submit(matcher.mask, matcher.new_tokens())

    def banned(self, row: SamplingRow, draft: Sequence[int] = ()) -> list[np.ndarray]:
        """Return (V,) bool, the tokens that may not come next, and those after each token of ``draft``.

        Where the grammar broke, and after a token that it does not allow, no token is left.
        """
        matcher = self._matcher_of(row)
        masks = [matcher.take_mask()]
        ahead = matcher.copy() if draft else matcher
        return masks + [ahead.mask([token_id]) for token_id in draft]

    def forced(self, row: SamplingRow) -> list[int]:
        """Return the tokens that must follow, up to max_tokens, for the caller to append; empty where other parameters see each token."""
        params = row.params
        seen = params.logprobs is not None or params.min_tokens or params.bad_words
        if not params.grammar or seen or params.allowed_token_ids is not None:
            return []
        matcher = self._matcher_of(row)
        matcher.consume(matcher.new_tokens())
        tokens, most = list[int](), params.max_tokens - len(row.token_ids) + row.num_prompt_tokens
        while found := matcher.forced[: most - len(tokens)]:  # a grammar may force text without end
            tokens += found
            matcher.consume(found)
        return tokens

    def release(self, row: SamplingRow) -> None:
        """Drop the state of a sequence that ended, if it has any."""
        self._matchers.pop(id(row), None)

    def _matcher_of(self, row: SamplingRow) -> "_RowMatcher":
        if id(row) not in self._matchers:
            self._matchers[id(row)] = _RowMatcher(row, self._matcher(row.params.grammar).deep_copy(), self._vocab_size)
        return self._matchers[id(row)]

    def _matcher(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                # The tokenizer may have more tokens than the model, for padding, or fewer.
                make = partial(LLTokenizer, self._tokenizer_json(), eos_token=self._eos_token_ids or None)
                self._tokenizer = make()
                if self._tokenizer.vocab_size < self._vocab_size:
                    self._tokenizer = make(n_vocab=self._vocab_size)
            tokenizer = self._tokenizer
            if (matcher := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return matcher
        limits = LLParserLimits(**_LIMITS)
        matcher = _with_large_stack(lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=limits))
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher


class _RowMatcher:
    """One sequence's place in its grammar. One thread at a time uses it: the others wait for the mask thread.

    If that has not begun with a mask when it is needed, this thread computes it: on busy cores waiting takes longer.
    """

    def __init__(self, row: SamplingRow, matcher: "LLMatcher", vocab_size: int) -> None:
        self._row, self._matcher, self._vocab_size = row, matcher, vocab_size
        self._num_consumed = 0  # generated tokens
        self.next_mask: tuple[int, Future[np.ndarray]] | None = None  # with the number of tokens that it follows
        # Tokens that must follow. Refilled only when empty, so they do not depend on which were appended without a pass.
        self.forced: list[int] = matcher.compute_ff_tokens()

    def copy(self) -> "_RowMatcher":
        """Return a matcher at the same place, to look ahead with."""
        ahead = _RowMatcher(self._row, self._matcher.deep_copy(), self._vocab_size)
        ahead.forced = list(self.forced)
        return ahead

    def new_tokens(self) -> list[int]:
        """The generated tokens that are not consumed yet. Waits for the mask thread if that has begun."""
        if self.next_mask is not None:
            if self.next_mask[1].cancel():
                self.next_mask = None
            else:
                self.next_mask[1].result()
        return self._row.token_ids[self._row.num_prompt_tokens + self._num_consumed :]

    def consume(self, tokens: Sequence[int]) -> None:
        for token_id in tokens:
            self._matcher.consume_token(token_id)
            self._num_consumed += 1
            if self.forced:
                self.forced.pop(0)
            if not self.forced and not self._matcher.is_stopped():
                self.forced = self._matcher.compute_ff_tokens()

    def mask(self, tokens: Sequence[int]) -> np.ndarray:
        """Consume ``tokens`` and return (V,) bool, the tokens that may not follow."""
        self.consume(tokens)
        banned_V = np.ones(self._vocab_size, bool)
        if self._matcher.is_error():
            return banned_V
        if self.forced:
            banned_V[self.forced[0]] = False
            return banned_V
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():  # a limit on the grammar's complexity
            return banned_V
        return np.unpackbits(packed, count=self._vocab_size, bitorder="little") == 0

    def take_mask(self) -> np.ndarray:
        tokens = self.new_tokens()
        if self.next_mask is not None and self.next_mask[0] == len(self._row.token_ids):
            return self.next_mask[1].result()
        return self.mask(tokens)
