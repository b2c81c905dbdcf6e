"""Show an answer while it is written, and what it cost.

python examples/stream.py [URL]
"""

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"

client = OpenAI(base_url=URL, api_key="none")
stream = client.chat.completions.create(
    model="chatglm3-demo",
    messages=[{"role": "user", "content": "What is tritongate?"}],
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:  # the last chunk, which has no choices
        print(f"\n{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} in the answer")
