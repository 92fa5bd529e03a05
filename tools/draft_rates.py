"""Times a running server's answers to code, repeated code and chats, one request at a time or several, to compare ``--speculation``.

    python tools/draft_rates.py HumanEval.jsonl.gz http://127.0.0.1:8000 [at_once=1] [most=64] [functions=8] [temperature=0]

A row for each kind: its tokens, their seconds after the first one of each answer, and tokens a second, with several at once of all
the time. Equal texts have the same last column, so that servers with and without drafts can be compared.
"""

import gzip
import json
import sys
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

WHOLE = "Complete the function below. Answer with the whole function in a Python code block, nothing else."
HINTS = "Add type hints to the code below. Write the whole code again."
CHATS = (
    "Tell me a short story about a lighthouse keeper.",
    "Why are there tides?",
    "Plan a day in Rome for me.",
    "Why is the sky blue?",
    "Write a poem about autumn.",
)


def prompts(problems: Sequence[dict[str, str]], functions: int) -> dict[str, list[str]]:
    """The prompts by kind: HumanEval's first functions, its first of 500 to 1,300 characters to write again, and chats."""
    whole = [each["prompt"] + each["canonical_solution"] for each in problems]
    again = [code for code in whole if 500 <= len(code) <= 1300][:functions]
    return {
        "code": [f"{WHOLE}\n\n```python\n{each['prompt']}```" for each in problems[:functions]],
        "hints": [f"{HINTS}\n\n```python\n{code}```" for code in again],
        "chats": list(CHATS),
    }


def ask(url: str, text: str, most: int, temperature: float) -> tuple[str, int, float]:
    """The answer, its tokens behind the first, and their seconds."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": most, "seed": 7}
    body |= {"temperature": temperature, "stream": True, "stream_options": {"include_usage": True}}
    answer, tokens, times = "", 0, list[float]()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {}
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            if piece := "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ())):
                answer += piece
                times.append(time.perf_counter())
    return answer, tokens - 1, times[-1] - times[0]


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        sys.stderr.write(
            "usage: python tools/draft_rates.py HumanEval.jsonl.gz URL [at_once=N] [most=N] [functions=N] [temperature=X]\n"
        )
        return 2
    given = {"at_once": 1.0, "most": 64.0, "functions": 8.0, "temperature": 0.0}
    given |= {name: float(value) for name, _, value in (each.partition("=") for each in argv[2:])}
    with gzip.open(argv[0], "rt") as file:
        kinds = prompts([json.loads(line) for line in file], int(given["functions"]))
    for kind, texts in kinds.items():
        begun = time.perf_counter()
        with ThreadPoolExecutor(int(given["at_once"])) as pool:
            found = list(pool.map(lambda text: ask(argv[1], text, int(given["most"]), given["temperature"]), texts))
        took = time.perf_counter() - begun if given["at_once"] > 1 else sum(seconds for _, _, seconds in found)
        tokens, same = sum(number for _, number, _ in found), zlib.crc32("".join(text for text, _, _ in found).encode())
        sys.stdout.write(f"{kind:6} {tokens:6} tokens {took:8.2f} s {tokens / took:8.2f} tokens/s  texts {same:08x}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
