"""Offer a tool, run the call that the model writes, and have it tell the result.

python examples/tools.py [URL]
"""

import json
import sys
from typing import Any

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"
MODEL = "chatglm3-demo"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Get the current weather of a city.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]

client = OpenAI(base_url=URL, api_key="none")
messages: list[Any] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, temperature=0)
message: Any = answer.choices[0].message
messages.append(message)
for call in message.tool_calls:
    print(f"{call.function.name}({call.function.arguments})")
    city = json.loads(call.function.arguments)["city"]
    found = {"city": city, "temperature": 21, "condition": "sunny"}  # a real tool would look
    messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(found)})
answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, temperature=0)
print(answer.choices[0].message.content)
