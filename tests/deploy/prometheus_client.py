"""Prometheus's HTTP API, and Grafana's part in a query: variables and intervals."""

import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

VARIABLES = {"$__rate_interval": "10s", "$model": ".*"}
"""What Grafana writes for All, and for a scrape interval of a second or two."""


class Prometheus:
    """One server, at `address`."""

    def __init__(self, address: str) -> None:
        self._client = httpx.Client(base_url=f"http://{address}/api/v1", timeout=30)

    def close(self) -> None:
        self._client.close()

    def answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self._client.get("/query", params={"query": "vector(1)"}).status_code == 200
        return False

    def get(self, path: str, **parameters: object) -> Any:
        answer = self._client.get(path, params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def series(self, expr: str, *, seconds: float) -> list[list[float]]:
        """Return the numbers, one list for each series, of the last `seconds`."""
        now = time.time()
        step = 1 if seconds < 3600 else seconds / 3600
        data = self.get("/query_range", query=fill_in(expr), start=now - seconds, end=now, step=step)
        found = ([float(value) for _, value in each["values"]] for each in data["result"])
        return [numbers for each in found if (numbers := [n for n in each if math.isfinite(n)])]

    def label_values(self, metric: str, label: str) -> list[str]:
        values: list[str] = self.get(f"/label/{label}/values", **{"match[]": metric})
        return values


def fill_in(expr: str) -> str:
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


def panels(dashboard: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the expressions of each panel."""
    document = json.loads(dashboard.read_text(encoding="utf-8"))
    for panel in document["panels"]:
        if panel["type"] != "row":
            yield panel["title"], [target["expr"] for target in panel["targets"]]
