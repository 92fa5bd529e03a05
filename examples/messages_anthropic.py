"""Anthropic's Messages API: counted tokens, a streamed answer, and a tool call with its result.

pip install anthropic
python examples/messages_anthropic.py [http://127.0.0.1:8000]
"""

import sys

from anthropic import Anthropic

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = Anthropic(base_url=url, api_key="unused")
model = client.models.list().data[0].id

question = [{"role": "user", "content": "What is the capital of France?"}]
print(client.messages.count_tokens(model=model, messages=question).input_tokens, "prompt tokens")

with client.messages.stream(
    model=model, max_tokens=40, system="Answer in one sentence.", messages=question, extra_body={"temperature": 0}
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
    print(f" [{stream.get_final_message().stop_reason}]")

weather = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
conversation = [{"role": "user", "content": "What is the weather in Paris?"}]
answer = client.messages.create(
    model=model,
    max_tokens=60,
    messages=conversation,
    tools=[weather],
    tool_choice={"type": "tool", "name": "get_weather"},
    extra_body={"temperature": 0},
)
call = answer.content[0]
print(call.name, call.input)

result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees, sunny"}
conversation += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
answer = client.messages.create(
    model=model,
    max_tokens=60,
    system="Answer in one sentence.",
    messages=conversation,
    extra_body={"temperature": 0},
)
print(answer.content[0].text)
