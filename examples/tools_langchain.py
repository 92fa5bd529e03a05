"""LangChain's ChatOpenAI: a bound tool, its result, and an answer in the form of a class.

pip install langchain-openai
python examples/tools_langchain.py [http://127.0.0.1:8000]
"""

import sys

import httpx
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
chat = ChatOpenAI(base_url=f"{url}/v1", api_key="unused", model=model, temperature=0, max_tokens=60)


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class City(BaseModel):
    city: str = Field(max_length=20)
    country: str = Field(max_length=20)


question = HumanMessage("What is 6 times 7?")
answer = chat.bind_tools([multiply], tool_choice="multiply").invoke([question])
call = answer.tool_calls[0]
print(call["name"], call["args"])

result = ToolMessage(str(multiply.invoke(call["args"])), tool_call_id=call["id"])
print(chat.invoke([question, answer, result]).content)

print(
    chat.with_structured_output(City, method="json_schema").invoke(
        "Rome is the capital of Italy. Give the city and the country as JSON."
    )
)
