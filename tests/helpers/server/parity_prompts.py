"""The texts the parity tests continue: English, code, Chinese, emoji, one token, and one of many steps."""

_STORY = (
    "The lighthouse keeper had counted ships for thirty years, and in that time he had learned that no two of them "
    "ever came out of the fog in quite the same way. "
)

SHORT = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "中国的首都是北京。请介绍一下这座城市的历史",
    "🎉🎂 Happy birthday! 🎈 Here are some emoji for the party: 🎁",
    "<|im_start|>user\nWhat is the tallest mountain on Earth?<|im_end|>\n<|im_start|>assistant\n",
    "The",
    "Ein kurzer Satz auf Deutsch über das Wetter in Hamburg:",
]


def long_text(num_words: int = 1300) -> str:
    """Varied prose that runs over many blocks and prefill chunks."""
    sentences = [
        f"On day {day} he wrote down {day * 7 % 23} names and {day * 5 % 11} flags. {_STORY}" for day in range(60)
    ]
    return " ".join(" ".join(sentences).split()[:num_words])
