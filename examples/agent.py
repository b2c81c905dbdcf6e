"""An agent: the model calls a tool until it has an answer.

python examples/agent.py [URL]
"""

import ast
import json
import operator
import sys
from typing import Any

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
FUNCTION = {"name": "calculate", "description": "Evaluate an arithmetic expression.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]


def value(node: Any) -> Any:
    """Compute a parsed expression: what a model wrote is never given to `eval`."""
    if isinstance(node, ast.Constant):
        return node.value
    return OPERATORS[type(node.op)](value(node.left), value(node.right))


client = OpenAI(base_url=URL, api_key="none")
messages: list[Any] = [{"role": "user", "content": "What is 37 * (12 + 9)?"}]
for _ in range(5):
    completion = client.chat.completions.create(
        model="chatglm3-demo", messages=messages, tools=TOOLS, temperature=0
    )
    message: Any = completion.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        print(message.content)
        break
    for call in message.tool_calls:
        expression = json.loads(call.function.arguments)["expression"]
        result = value(ast.parse(expression, mode="eval").body)
        print(f"{expression} = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps({"result": result})})
