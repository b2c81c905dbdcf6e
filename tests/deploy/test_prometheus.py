"""Prometheus's configuration and rules, by Prometheus's own tool."""

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
CASES = sorted((FOLDER / "tests").glob("*.yml"))
PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="LEFT OUT: promtool is not installed, so no alert was tried (apt install prometheus)",
)


def rules() -> list[dict[str, Any]]:
    return [
        rule
        for name in ("recording.yml", "alerts.yml")
        for group in yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@PROMTOOL
def test_the_configuration() -> None:
    promtool("check", "config", FOLDER / "prometheus.yml")


@PROMTOOL
def test_the_rules_are_good_style() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", FOLDER / "recording.yml", FOLDER / "alerts.yml")


@PROMTOOL
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_alerts_fire_and_are_silent(path: Path) -> None:
    promtool("test", "rules", path)


def test_every_alert_has_a_firing_and_a_silent_case() -> None:
    fires: dict[str, set[bool]] = defaultdict(set)
    for path in CASES:
        for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            for case in test["alert_rule_test"]:
                fires[case["alertname"]].add(bool(case.get("exp_alerts")))
    assert fires == {name: {True, False} for name in ALERTS}


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_runbook(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in {"critical", "warning"}
    path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert anchor == name.lower()
    for page in (ROOT / path, (ROOT / path).with_suffix(".zh.md")):
        sections = re.split(r"^### ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        texts = {title.strip(): body for title, _, body in (section.partition("\n") for section in sections)}
        assert name in texts
        assert len(texts[name].strip()) > 80


@pytest.mark.parametrize(
    ("route", "counts"),
    [
        ("/v1/chat/completions", True),
        ("/v2/models/{model:path}/infer", True),
        ("/v2/models/{model:path}/versions/{version}/infer", True),
        ("/inference.GRPCInferenceService/ModelInfer", True),
        ("/inference.GRPCInferenceService/ModelStreamInfer", True),
        ("/MutilBackendService/Predict", True),
        ("/v2/health/ready", False),
        ("/inference.GRPCInferenceService/ServerReady", False),
        ("/health/ready", False),
    ],
)
def test_what_counts_as_a_request_for_an_answer(route: str, *, counts: bool) -> None:
    patterns = {found for rule in rules() for found in re.findall(r'route=~"([^"]+)"', rule["expr"])}
    (pattern,) = patterns
    assert bool(re.fullmatch(pattern, route)) == counts
    assert f'route=~\\"{pattern}\\"' in (ROOT / "deploy/grafana/dashboards/service.json").read_text(
        encoding="utf-8"
    )


def test_the_objectives_bounds_are_buckets() -> None:
    """A bound between two buckets would count nothing at all."""
    from gateway.telemetry.metrics import Metrics  # noqa: PLC0415 - beside its only use

    metrics = Metrics()
    metrics.time_to_first_token.labels("m").observe(1)
    metrics.inter_token_latency.labels("m").observe(0.01)
    exported = metrics.render().decode()
    found = {
        (name, bound)
        for rule in rules()
        for name, bound in re.findall(r'(\w+_bucket)\{le="([^"]+)"\}', rule["expr"])
    }
    assert found
    for name, bound in found:
        assert re.search(rf'^{name}\{{.*le="{re.escape(bound)}"', exported, re.MULTILINE), (name, bound)
