"""Chats with a Tightwire server through OpenAI's client: one whole answer, one streamed.

pip install openai
python examples/chat_openai.py [http://127.0.0.1:8000]
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="unused")  # the server's --api-key, if it has one
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    temperature=0,
    max_tokens=40,
)
print(answer.choices[0].message.content)

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name three colors."}],
    temperature=0,
    max_tokens=60,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
