"""vLLM itself: starting its engine, and its own types for requests. The only module that imports vLLM.

What is used of it has been the same since vLLM 0.11; parameters and engine arguments are whatever the
installed version has.
"""

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import io
import json
import os
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final, get_type_hints

import msgspec
from PIL import Image
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from triton_models.errors import EngineStoppedError, EntryError, InvalidRequestError
from triton_models.vllm.options import Options
from triton_models.vllm.tensors import EmbeddingRequest, TextRequest

try:
    from vllm.exceptions import VLLMClientError
except ImportError:  # before vLLM 0.3x, a request's faults were ValueErrors
    VLLMClientError = ValueError

_OWN: Final = frozenset({"output_kind", "skip_clone", "output_text_buffer_length", "structured_outputs"})
"""Parameters that are not the client's to set, or that are read in a way of their own."""
_TYPES: Final = {
    name: kind for name, kind in get_type_hints(SamplingParams).items() if name[0] != "_" and name not in _OWN
}


class Engine:
    """A running engine. All methods but the construction belong to the thread of one event loop.

    Args:
        options: the entry's.

    Raises:
        EntryError: vLLM has no such argument; or any exception of vLLM that it does not start.
    """

    def __init__(self, options: Options) -> None:
        if options.devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = options.devices
        known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
        if unknown := sorted(set(options.engine) - known):
            version = importlib.metadata.version(importlib.metadata.packages_distributions()["vllm"][0])
            raise EntryError(f"model.json: vLLM {version} has no engine argument {', '.join(unknown)}")
        # As a server: how many tokens a step may hold by default depends on it.
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**options.engine), usage_context=UsageContext.OPENAI_API_SERVER
        )
        self._adapters = {
            name: LoRARequest(name, number, path)
            for number, (name, path) in enumerate(options.adapters.items(), 1)
        }

    @property
    def dead(self) -> bool:
        """Whether the engine has ended and answers nothing any more."""
        return bool(self._llm.errored)

    async def generate(self, request: TextRequest) -> AsyncGenerator[tuple[Any, int], None]:
        """Yield vLLM's RequestOutputs for a request, with the number of its choices.

        Those that come while the caller is busy become one. Closing the iterator, or cancelling the task that
        waits in it, aborts the request in the engine.

        Raises:
            InvalidRequestError: vLLM does not take it.
            EngineStoppedError: the engine is dead.
        """
        try:
            parameters, adapter = self._parameters(request)
            prompt: Any = request.prompt
            if request.images:
                images = await asyncio.to_thread(lambda: list(map(_decoded, request.images)))
                prompt = {"prompt": prompt, "multi_modal_data": {"image": images}}
            outputs = self._llm.generate(prompt, parameters, uuid.uuid4().hex, lora_request=adapter)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output, parameters.n
        except (VLLMClientError, ValueError, TypeError, NotImplementedError) as error:
            raise InvalidRequestError(str(error)) from error
        except EngineDeadError as error:
            raise EngineStoppedError("vLLM's engine has died") from error

    async def embed(self, request: EmbeddingRequest) -> tuple[list[float], int]:
        """Return an embedding, and the number of the prompt's tokens.

        Raises:
            InvalidRequestError: vLLM does not take it, or the model has no embeddings.
            EngineStoppedError: the engine is dead.
        """
        prompt: Any = request.prompt
        if isinstance(prompt, list):
            prompt = {"prompt_token_ids": prompt}
        try:
            if "embed" not in await self._llm.get_supported_tasks():
                raise InvalidRequestError("the model has no embeddings")
            parameters = PoolingParams(dimensions=request.dimensions, task="embed")
            encoded = self._llm.encode(prompt, parameters, uuid.uuid4().hex)
            (output,) = [each async for each in encoded]
            return output.outputs.data.tolist(), len(output.prompt_token_ids)
        except (VLLMClientError, ValueError, TypeError, NotImplementedError) as error:
            raise InvalidRequestError(str(error)) from error
        except EngineDeadError as error:
            raise EngineStoppedError("vLLM's engine has died") from error

    def close(self) -> None:
        """End the engine and its processes."""
        self._llm.shutdown()

    def _parameters(self, request: TextRequest) -> tuple[SamplingParams, LoRARequest | None]:
        given = dict(request.parameters)
        adapter = given.pop("lora_name", None)
        if adapter is not None and adapter not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise InvalidRequestError(f"lora_name: there is no adapter {adapter!r}; there are: {known}")
        kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
        parameters = SamplingParams(**_typed(given), output_kind=kind)
        return parameters, None if adapter is None else self._adapters[adapter]


def _typed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with values of their types; numbers may be written as text.

    Raises:
        InvalidRequestError: it names the parameter.
    """
    typed = {}
    for name, value in given.items():
        try:
            if name == "structured_outputs":
                document = json.loads(value) if isinstance(value, str) else value
                typed[name] = StructuredOutputsParams(**document)
            elif name in _TYPES:
                typed[name] = msgspec.convert(value, _TYPES[name], strict=False)
            else:
                raise InvalidRequestError(f"{name} is no parameter of vLLM's")
        except (VLLMClientError, ValueError, TypeError) as error:
            raise InvalidRequestError(f"{name}: {error}") from None
    return typed


def _decoded(image: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(image)).convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # as Pillow says it of its formats
        raise InvalidRequestError(f"image: {error}") from None
