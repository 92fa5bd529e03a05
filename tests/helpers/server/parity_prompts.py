"""The texts the parity tests continue: English, code, Chinese, emoji, one token, and one of many steps."""

_STORY = (
    "The lighthouse keeper had counted ships for thirty years, and in that time he had learned that no two of them "
    "ever came out of the fog in quite the same way. "
)

SHORT = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived a",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "import numpy as np\n\n# Multiply two matrices and print the result\na = np.array([[1, 2], [3, 4]])\n",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "中国的首都是北京。请介绍一下这座城市的历史",
    "今天天气很好，我们一起去公园",
    "🎉🎂 Happy birthday! 🎈 Here are some emoji for the party: 🎁",
    "1 2 3 4 5 6 7 8 9 10 11 12",
    "<|im_start|>user\nWhat is the tallest mountain on Earth?<|im_end|>\n<|im_start|>assistant\n",
    "Q: If a train leaves at 3:15 and travels for 2 hours and 50 minutes, when does it arrive?\nA:",
    "The",
    "Ein kurzer Satz auf Deutsch über das Wetter in Hamburg:",
]


def long_text(num_words: int = 1300) -> str:
    """Varied prose that runs over many blocks and prefill chunks."""
    sentences = [
        f"On day {day} he wrote down {day * 7 % 23} names and {day * 5 % 11} flags. {_STORY}" for day in range(60)
    ]
    return " ".join(" ".join(sentences).split()[:num_words])
