"""docker-compose.yml as Compose reads it: variables filled in, anchors merged, profiles chosen."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
EXAMPLE_ENV = ROOT / "deploy" / "example.env"
EXAMPLE_KEYS = ROOT / "deploy" / "keys.env.example"
CHOSEN = {"GRAFANA_PASSWORD": "chosen", "TRITON_KEY": "chosen, too"}
"""What `.env` must have, and the example leaves empty."""

_VARIABLE = re.compile(r"\$\{(\w+)(?::(-|\?)([^}]*))?\}")


def read_env(path: Path) -> dict[str, str]:
    """Read NAME=VALUE lines as Compose does; a value in single quotes is literal."""
    values = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            values[name] = value[1:-1] if value.startswith("'") and value.endswith("'") else value
    return values


def variables() -> set[str]:
    """Return what the file asks of `.env`."""
    return {found[0] for found in _VARIABLE.findall(COMPOSE_FILE.read_text(encoding="utf-8"))}


def load_compose(env: dict[str, str]) -> dict[str, Any]:
    def fill(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        if env.get(name):
            return env[name]
        if kind == "?":
            raise KeyError(rest)
        return rest or ""

    # Comments may mention variables too: only what YAML keeps is filled in.
    document = yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8"))
    filled: dict[str, Any] = _each_string(document, lambda text: _VARIABLE.sub(fill, text))
    return filled


def _each_string(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each_string(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _each_string(item, change) for key, item in value.items()}
    return value


def dockerfile(service: dict[str, Any]) -> str:
    return (ROOT / str(service["build"]["dockerfile"])).read_text(encoding="utf-8")


def entrypoint(service: dict[str, Any]) -> list[str]:
    (found,) = re.findall(r"^ENTRYPOINT (\[.*\])$", dockerfile(service), re.MULTILINE)
    words: list[str] = json.loads(found)
    return words


def copied(service: dict[str, Any]) -> dict[str, Path]:
    """Return the files that the image's last stage takes from the repository, by their path in the image."""
    last_stage = dockerfile(service).rsplit("\nFROM ", 1)[1]
    found = {}
    for line in re.findall(r"^COPY (?!--from)(.*)$", last_stage, re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            found[f"{target.rstrip('/')}/{Path(source).name}" if target.endswith("/") else target] = (
                ROOT / source
            )
    return found
