"""LangChain in front of ChatGLM: the field's `LLM` over Predict, and `ChatOpenAI` over the OpenAI routes."""

import base64
import json
import struct
from typing import Any

import httpx
import pytest
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models.llms import LLM
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

MODEL = "chatglm3"
HELLO = "你好"
AGAIN = "再说一次"
NEW_TOKENS = 20


class TritonLLM(LLM):
    """As the field writes it: a ModelInferRequest as protobuf JSON, and the history it gets back kept."""

    endpoint: str
    shape: int = 1
    temperature: float = 0
    max_token: int = 256
    history: str = ""

    @property
    def _llm_type(self) -> str:
        return "chatglm-on-triton"

    def _call(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        texts = {
            "prompt": prompt,
            "history": self.history,
            "temperature": str(self.temperature),
            "max_token": str(self.max_token),
        }
        body = {
            "model_name": MODEL,
            "inputs": [
                {
                    "name": name,
                    "datatype": "BYTES",
                    "shape": [self.shape],
                    "contents": {"bytes_contents": [base64.b64encode(text.encode()).decode()]},
                }
                for name, text in texts.items()
            ],
            "outputs": [{"name": "response"}, {"name": "history"}],
        }
        answer = httpx.post(self.endpoint + "/MutilBackendService/Predict", json=body, timeout=100)
        answer.raise_for_status()
        found = answer.json()
        texts = {
            output["name"]: first_string(raw)
            for output, raw in zip(found["outputs"], found["raw_output_contents"], strict=True)
        }
        self.history = texts["history"]
        return texts["response"]


def first_string(raw: str) -> str:
    data = base64.b64decode(raw)
    (length,) = struct.unpack_from("<I", data)
    return data[4 : 4 + length].decode()


@pytest.fixture
def chat(base_url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=base_url + "/v1",
        api_key="unused",
        temperature=0,
        max_tokens=NEW_TOKENS,
        max_retries=0,
        stream_usage=True,
    )


@pytest.mark.parametrize("shape", [1, -1])
def test_the_fields_llm_and_chatopenai_say_the_same(base_url: str, chat: ChatOpenAI, shape: int) -> None:
    """Two turns, greedily; the second over the history that each of them keeps."""
    llm = TritonLLM(endpoint=base_url, shape=shape)
    said: list[BaseMessage] = []
    for prompt in (HELLO, AGAIN):
        expected = chat.invoke([*said, HumanMessage(prompt)])
        llm.max_token = expected.usage_metadata["input_tokens"] + NEW_TOKENS  # it counts the prompt too
        answer = llm.invoke(prompt)
        assert answer
        # What that contract returns is stripped, as the original `chat` did.
        assert answer == expected.content.strip()
        said += [HumanMessage(prompt), AIMessage(answer)]
        turns = json.loads(llm.history)
        assert [turn["content"] for turn in turns] == [message.content for message in said]
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(said) // 2)


def test_an_error_of_predict_reaches_the_llms_caller(base_url: str) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        TritonLLM(endpoint=base_url, temperature=9).invoke(HELLO)


def test_a_stream_is_the_answer_in_pieces(chat: ChatOpenAI) -> None:
    whole = chat.invoke(HELLO)
    # With its token ids no piece is joined to the next, as a busy machine may do.
    chunks = list(chat.stream(HELLO, extra_body={"return_token_ids": True}))
    assert sum(bool(chunk.content) for chunk in chunks) > 1
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert joined.content == whole.content
    assert joined.usage_metadata == whole.usage_metadata
    assert whole.response_metadata["finish_reason"] == joined.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata["output_tokens"] == NEW_TOKENS


async def test_a_batch_is_answered_in_order_and_as_one_by_one(chat: ChatOpenAI) -> None:
    prompts = [HELLO, AGAIN, "1 + 1"]
    alone = [chat.invoke(prompt).content for prompt in prompts]
    assert len(set(alone)) == len(prompts)
    assert [message.content for message in await chat.abatch(prompts)] == alone


def test_a_chain_with_a_system_message(chat: ChatOpenAI) -> None:
    prompt = ChatPromptTemplate.from_messages([SystemMessage("Be brief."), ("user", "{question}")])
    answer = (prompt | chat | StrOutputParser()).invoke({"question": HELLO})
    assert answer == chat.invoke([SystemMessage("Be brief."), HumanMessage(HELLO)]).content
    assert answer != chat.invoke(HELLO).content
