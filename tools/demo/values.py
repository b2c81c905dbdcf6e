"""What the pages state of the project and the project itself knows: limits, ports, routes, formats, versions.

A page writes `${port}` and gets the port of the settings, so that it cannot state another one. Numbers that
were measured, and are in no code, stand in the pages themselves.
"""

import json
import re
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, Final, Literal

import msgspec
from fastapi.routing import APIRoute

import triton_models
from gateway.app import create_app
from gateway.cli import UP_DRAIN_S, UP_PORTS
from gateway.http.middleware import IGNORED_HEADER
from gateway.settings import ENV_PREFIX, Settings
from gateway.up import METRICS_PORT
from triton_models.directory import BLOOM_TYPE, NATIVE_TYPES, FormatName
from triton_models.engine.settings import BLOCK_TOKENS
from triton_models.serving.report import PREFIX
from triton_models.serving.service import HEARTBEAT_S
from wire.limits import STOPS_LIMIT, TOP_LOGPROBS_LIMIT
from wire.options import OPTIONS
from wire.sampling import Sampling

Lang = Literal["en", "zh"]
LANGS: tuple[Lang, ...] = ("en", "zh")
Text = Mapping[Lang, str]
"""The same text in both languages."""

ROOT: Final = Path(__file__).parents[2]
CHECKPOINT: Final = Path(triton_models.__file__).parent / "checkpoints" / "chatglm3-demo"
LARGEST_TERM: Final = 100
LARGEST_FACTOR: Final = 20
"""Of the sums and products that the model learns."""

_OWN: Final[Mapping[str, str]] = {
    "chatglm2": "ChatGLM2",
    "chatglm3": "ChatGLM3",
    "glm4": "GLM-4",
    "template": "",  # of other families
}
_NATIVE: Final[Mapping[str, str]] = {
    "glm": "",  # said already, in its own layout
    "glm4": "",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen",
    "qwen3": "Qwen",
    "bloom": "BLOOM",
}
_KSERVE: Final = "/v2"
_PREDICT: Final = "/MutilBackendService/Predict"
_DESCRIBES: Final = ("/openapi.json", "/docs")
"""For clients of old."""
_WORDS: Final[Mapping[Lang, tuple[str, ...]]] = {
    "en": ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    "zh": ("零", "一", "两", "三", "四", "五", "六", "七", "八", "九", "十"),
}


def fill(node: Any, lang: Lang = "en") -> Any:
    """Return a page's text, list or table with the values in place of their names.

    Args:
        node: as TOML has it; what stands below a key that is a language is in that language.
        lang: of what stands below no such key.

    Raises:
        KeyError: there is no value of a name.
    """
    if isinstance(node, dict):
        return {key: fill(value, key if key in LANGS else lang) for key, value in node.items()}
    if isinstance(node, list):
        return [fill(each, lang) for each in node]
    return Template(node).substitute(values(lang)) if isinstance(node, str) else node


@cache
def values(lang: Lang) -> Mapping[str, str]:
    """Return every value by the name that pages have for it."""
    settings = Settings.model_validate({})
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (dtypes,) = (option.choices for option in OPTIONS if option.name == "dtype")
    return {
        "body_mib": str(settings.max_body_bytes // 2**20),
        "drain_s": f"{settings.drain_s:g}",
        "dtypes": _joined(dtypes, lang, last={"en": "or", "zh": "或"}),
        "endpoints": _listed(endpoints(), lang),
        "engine_prefix": PREFIX,
        "env_prefix": ENV_PREFIX,
        "glibc": _found(r"glibc ([\d.]+)", "README.md")[0],
        "heartbeat_s": _WORDS[lang][int(HEARTBEAT_S)],
        "ignored_header": IGNORED_HEADER.lower(),
        "in_flight": str(settings.max_in_flight),
        "kserve": _KSERVE,
        "kserve_grpc_port": str(UP_PORTS["kserve_grpc_port"]),
        "kserve_http_port": str(UP_PORTS["kserve_http_port"]),
        "kv_block": str(BLOCK_TOKENS),
        "largest_factor": str(LARGEST_FACTOR),
        "largest_term": str(LARGEST_TERM),
        "layers": _WORDS[lang][json.loads((CHECKPOINT / "config.json").read_bytes())["num_layers"]],
        "licence": project["license"],
        "logprobs": str(TOP_LOGPROBS_LIMIT),
        "metrics_port": str(METRICS_PORT),
        "millions": _WORDS[lang][round((CHECKPOINT / "model.safetensors").stat().st_size / 2 / 10**6)],
        "model": CHECKPOINT.name,
        "native_models": _joined(_named((*NATIVE_TYPES, BLOOM_TYPE), _NATIVE), lang),
        "own_models": _joined(_named(typing.get_args(FormatName), _OWN), lang),
        "port": str(settings.port),
        "pythons": _joined(pythons(), lang, last={"en": "or", "zh": "或"}),
        "stops": str(STOPS_LIMIT),
        "temperature": str(_most(Sampling, "temperature")),
        "timeout_s": f"{settings.request_timeout_s:g}",
        "up_drain_s": f"{UP_DRAIN_S:g}",
        "upstream_port": settings.upstreams[0].rpartition(":")[2],
        "waiting": str(settings.max_waiting),
    }


def routes() -> Iterator[APIRoute]:
    """Yield the gateway's routes, without those of the chat page and of the API's description."""
    app = create_app(Settings.model_validate({"chat_page": False}))
    return (route for route in app.routes if isinstance(route, APIRoute) and route.path not in _DESCRIBES)


def endpoints() -> list[str]:
    """Return the paths that have no part to fill in, without those below another one and without KServe's."""
    paths = dict.fromkeys(route.path for route in routes() if "{" not in route.path)
    return [
        path
        for path in paths
        if not any(path.startswith((f"{above}/", _KSERVE)) for above in paths) and path != _PREDICT
    ]


def pythons() -> list[str]:
    """Return the versions of Python that can run all of it, as the Makefile checks them."""
    return [f"{major}.{minor}" for major, minor in _found(r"\((\d+), (\d+)\)", "Makefile")]


def _found(pattern: str, file: str) -> list[Any]:
    return re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"))


def _most(struct: type[msgspec.Struct], field: str) -> int | float | None:
    """Return the largest value of a number in a struct."""
    (found,) = (each for each in msgspec.inspect.type_info(struct).fields if each.name == field)  # type: ignore[attr-defined]
    most: int | float | None = found.type.le
    return most


def _named(keys: Iterable[str], names: Mapping[str, str]) -> list[str]:
    """Return the names of families, each once; one without a name is a KeyError, not left out."""
    return list(dict.fromkeys(name for key in keys if (name := names[key])))


def _listed(texts: Iterable[str], lang: Lang) -> str:
    return (", " if lang == "en" else "、").join(texts)


def _joined(texts: Iterable[str], lang: Lang, last: Text | None = None) -> str:
    *before, end = texts
    word = (last or {"en": "and", "zh": "和"})[lang]
    return f"{_listed(before, lang)} {word} {end}" if lang == "en" else f"{_listed(before, lang)}{word}{end}"
