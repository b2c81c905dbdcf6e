"""Get an answer that follows a JSON schema: it is enforced while the answer is sampled.

python examples/json_schema.py [URL]
"""

import json
import sys
from typing import Any

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["北京", "上海"]}, "sure": {"type": "boolean"}},
    "required": ["city", "sure"],
    "additionalProperties": False,
}

client = OpenAI(base_url=URL, api_key="none")
completion = client.chat.completions.create(
    model="chatglm3-demo",
    messages=[{"role": "user", "content": "中国的首都是哪里？"}],
    response_format={"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA}},
    temperature=0,
)
answer = json.loads(completion.choices[0].message.content or "")
print(f"city: {answer['city']}, sure: {answer['sure']}")
