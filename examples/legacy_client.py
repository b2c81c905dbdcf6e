"""A client as it was written for ChatGLM on Triton, which works unchanged: KServe v2 over HTTP.

python examples/legacy_client.py [HOST:PORT]
"""

import sys

import numpy as np
import tritonclient.http

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8000"


def ask(client: tritonclient.http.InferenceServerClient, prompt: str, history: str) -> tuple[str, str]:
    """Return the answer, and the conversation with it, to be sent with the next question."""
    values = {"prompt": prompt, "history": history, "temperature": "0.1", "max_token": "1024"}
    inputs = []
    for name, value in values.items():
        tensor = tritonclient.http.InferInput(name, [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[value.encode()]], dtype=object))
        inputs.append(tensor)
    result = client.infer("chatglm3-demo", inputs)
    response, history = (result.as_numpy(name)[0, 0].decode() for name in ("response", "history"))
    return response, history


with tritonclient.http.InferenceServerClient(ADDRESS) as client:
    history = ""
    for question in ("Could you explain what TTFT is?", "请用中文再讲一遍。"):
        answer, history = ask(client, question, history)
        print(f"> {question}\n{answer}\n")
