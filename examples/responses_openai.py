"""OpenAI's Responses API: a streamed answer, an answer in a JSON schema, and a function call with its result.

    pip install openai
    python examples/responses_openai.py [http://127.0.0.1:8000]

The server stores nothing, so every request has the whole conversation.
"""

import json
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="unused")
model = client.models.list().data[0].id

with client.responses.stream(
    model=model, input="What is the capital of France?", instructions="Answer in one sentence.", temperature=0
) as stream:
    for event in stream:
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
print()

city = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
answer = client.responses.create(
    model=model,
    input="Rome is the capital of Italy. Give the city and the country as JSON.",
    text={"format": {"type": "json_schema", "name": "city", "schema": city}},
    temperature=0,
)
print(json.loads(answer.output_text))

weather = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
conversation = [{"role": "user", "content": "What is the weather in Paris?"}]
answer = client.responses.create(
    model=model, input=conversation, tools=[weather], tool_choice="required", parallel_tool_calls=False, temperature=0
)
call = answer.output[0]
print(call.name, call.arguments)

conversation += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees, sunny"}]
answer = client.responses.create(
    model=model, input=conversation, instructions="Answer in one sentence.", temperature=0, max_output_tokens=60
)
print(answer.output_text)
