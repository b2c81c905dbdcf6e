"""Rules about the source tree itself: file sizes and who may import whom."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "triton_models", "wire")
LONGEST_FILE = 500

FORBIDDEN = {
    "wire": {"gateway", "triton_models", "torch", "transformers", "tritonclient", "grpc", "fastapi"},
    "gateway": {"triton_models", "torch", "transformers", "sentencepiece", "tiktoken", "pytriton", "numpy"},
    "triton_models": {"gateway", "fastapi", "uvicorn"},
    "triton_models/engine": {
        "wire",
        "triton_models.text",
        "triton_models.serving",
        "triton_models.embedded",
        "sentencepiece",
        "tiktoken",
        "tritonclient",
    },
    "triton_models/text": {"torch", "triton_models.engine", "triton_models.serving", "tritonclient"},
    "triton_models/vllm": {
        "torch",
        "tritonclient",
        "triton_models.embedded",
        "triton_models.engine",
        "triton_models.text",
    },
    "gateway/core": {"grpc", "tritonclient", "fastapi", "starlette", "gateway.openai", "gateway.triton"},
    "gateway/openai": {"wire", "grpc", "tritonclient", "gateway.triton"},
    "gateway/anthropic": {"wire", "grpc", "tritonclient", "gateway.triton"},
    "gateway/http": {"wire", "grpc", "tritonclient", "gateway.triton"},
    "gateway/triton": {"fastapi", "starlette", "gateway.openai", "gateway.http"},
    "gateway/kserve": {"gateway.triton", "gateway.process"},
    "gateway/chat": {"fastapi", "starlette", "grpc", "tritonclient", "gateway.openai"},
    "gateway/limits": {"fastapi", "starlette", "grpc", "gateway.core", "gateway.http", "gateway.openai"},
    "deploy/docker": {"gateway", "deploy", "fastapi", "uvicorn", "grafana_foundation_sdk"},
    "deploy/grafana": {"gateway", "triton_models", "wire", "deploy.docker"},
}

ALLOWED = {
    room: {"wire.limits", "wire.text"} for room in ("gateway/openai", "gateway/anthropic", "gateway/http")
}
"""Within what is forbidden: numbers and characters know no tensors."""


FAMILIES = re.compile(r"glm|hermes|llama|mistral|qwen", re.IGNORECASE)
KNOW_FAMILIES = {"chat", "triton/dialects", "settings"}
"""Rooms of the gateway; of settings, the name of a contract for legacy clients and the help on it."""


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_layer_imports_only_what_it_may_know(folder: str) -> None:
    files = sources(folder)
    assert files
    offences = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files
        for module in imports(path)
        for forbidden in FORBIDDEN[folder]
        if is_within(module, forbidden)
        and not any(is_within(module, allowed) for allowed in ALLOWED.get(folder, ()))
    ]
    assert not offences


def words(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the names and strings of a module's code, docstrings left out, with their lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.lineno, node.value
        for name in ("id", "attr", "name", "arg", "module"):
            if isinstance(word := getattr(node, name, None), str):
                yield getattr(node, "lineno", 0), word


def test_no_other_room_of_the_gateway_knows_a_model_by_name() -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{line} {word}"
        for path in sources("gateway")
        if not any(path.is_relative_to(ROOT / "gateway" / room) for room in KNOW_FAMILIES)
        for line, word in words(path)
        if FAMILIES.search(word)
    ]
    assert not offences


def test_what_is_installed_is_the_product_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    include = project["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert "tools" in folders
    matched = {name for name in folders if any(fnmatch(name, each) for each in include)}
    assert matched == set(PACKAGES)


def test_one_module_imports_vllm() -> None:
    importing = {
        path.name
        for path in sources("triton_models")
        for module in imports(path)
        if is_within(module, "vllm")
    }
    assert importing == {"engine.py"}


def test_two_modules_import_transformers() -> None:
    """Importing it takes seconds, so they are imported only where it is asked for."""
    importing = {
        path.name
        for path in sources("triton_models")
        for module in imports(path)
        if is_within(module, "transformers")
    }
    assert importing == {"transformers_checkpoint.py", "transformers_model.py"}


def test_no_file_is_longer_than_its_limit() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for folder in (*PACKAGES, "tests", "bench", "tools", "deploy", "examples")
        for path in sources(folder)
    }
    assert not {name: length for name, length in lengths.items() if length > LONGEST_FILE}


def plainly_installed() -> set[str]:
    """Return the distributions that `pip install tritongate` installs, without an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: set[str] = set()
    queue = [(Requirement(each), "") for each in project["dependencies"]]
    while queue:
        requirement, extra = queue.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name in found and not requirement.extras:
            continue
        found.add(name)
        needs = [Requirement(each) for each in metadata.requires(name) or ()]
        queue += [(each, wanted) for each in needs for wanted in ("", *requirement.extras)]
    return found


def test_the_gateway_runs_without_the_models_side() -> None:
    """As after a plain `pip install tritongate`: no other distribution that is installed here is there."""
    plain = plainly_installed()
    assert {"fastapi", "pyyaml"} <= plain
    assert not {"torch", "transformers", "nvidia-pytriton"} & plain
    absent = ["triton_models"] + [
        module
        for module, owners in metadata.packages_distributions().items()
        if plain.isdisjoint(map(canonicalize_name, owners)) and module not in {"gateway", "wire"}
    ]
    program = f"""
import importlib, pkgutil, sys
for name in {absent}:
    sys.modules[name] = None
import gateway
for module in pkgutil.walk_packages(gateway.__path__, "gateway."):
    importlib.import_module(module.name)
print("imported")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n", done.stderr


def test_nothing_evaluates_or_unpickles() -> None:
    offences = []
    for folder in PACKAGES:
        for path in sources(folder):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                name = ast.unparse(node.func)
                keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
                unsafe = (
                    name in {"eval", "exec", "pickle.load", "pickle.loads"}
                    or (name == "torch.load" and keywords.get("weights_only") != "True")
                    or keywords.get("trust_remote_code") == "True"
                )
                if unsafe:
                    offences.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert not offences
