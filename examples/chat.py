"""Talk to the model: two questions, the second about the first answer.

python examples/chat.py [URL]
"""

import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"

client = OpenAI(base_url=URL, api_key="none")
messages: list[ChatCompletionMessageParam] = []
for question in ("Could you explain what TTFT is?", "请用中文再讲一遍。"):
    messages.append({"role": "user", "content": question})
    completion = client.chat.completions.create(model="chatglm3-demo", messages=messages, temperature=0)
    answer = completion.choices[0].message.content
    messages.append({"role": "assistant", "content": answer})  # the server stores nothing: send it all again
    print(f"> {question}\n{answer}\n")
