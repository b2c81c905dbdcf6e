"""The Kubernetes manifests, against Kubernetes' own schemas, each other, and what the code reads."""

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from deploy.docker import triton_health
from deploy.docker.start_triton import main as start_triton
from gateway.settings import load_settings, settings_table
from gateway.settings.values import revealed
from gateway.triton.options import HealthPolicy
from gateway.up import METRICS_PORT
from tests.deploy.compose_file import CHOSEN, load_compose

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("one-node", "many")
CLUSTER_DNS_CACHE_S = 30
"""What CoreDNS keeps an answer for, unless somebody set it otherwise."""
KEY = '[{"name": "a", "key": "b"}]'

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None,
    reason="LEFT OUT: kubectl is not installed, so no overlay was rendered, only the base checked",
)


def base() -> list[dict[str, Any]]:
    files = sorted((ROOT / "gateway" / "manifests" / "base").glob("*.yaml"))
    documents = [each for file in files for each in yaml.safe_load_all(file.read_text(encoding="utf-8"))]
    return [each for each in documents if each["kind"] != "Kustomization"]


@cache
def render(overlay: str) -> str:
    done = subprocess.run(
        ["kubectl", "kustomize", FOLDER / "overlays" / overlay], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(overlay: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(render(overlay)))


def one(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [
        each for each in documents if each["kind"] == kind and each["metadata"]["name"].startswith(name)
    ]
    return found


def pod(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    spec = document["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


def validate(text: str, tmp_path: Path) -> str:
    file = tmp_path / "documents.yaml"
    file.write_text(text, encoding="utf-8")
    tool = Path(sys.executable).with_name("kubernetes-validate")
    done = subprocess.run([tool, "--strict", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_base_obeys_kubernetes_schemas(tmp_path: Path) -> None:
    said = validate(yaml.safe_dump_all(base()), tmp_path)
    assert said.count("passed for resource") == len(base())


def test_the_check_can_fail(tmp_path: Path) -> None:
    wrong = base()[0]
    wrong["spec"]["portz"] = []
    with pytest.raises(AssertionError, match="portz"):
        validate(yaml.safe_dump(wrong), tmp_path)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_obey_kubernetes_schemas(overlay: str, tmp_path: Path) -> None:
    documents = rendered(overlay)
    ours = [each for each in documents if each["apiVersion"] != "monitoring.coreos.com/v1"]
    assert validate(render(overlay), tmp_path).count("passed for resource") == len(ours) >= len(base())
    assert {each["metadata"]["namespace"] for each in documents} == {"tritongate"}


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_gateways_configuration_is_settings(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = rendered(overlay)
    values = one(documents, "ConfigMap", "gateway")["data"]
    _, container = pod(one(documents, "Deployment", "gateway"))
    given = {each["name"]: each.get("value", KEY) for each in container["env"]}
    parts = {name for value in given.values() for name in re.findall(r"\$\((\w+)\)", value)}
    assert (values.keys() | given.keys()) - parts <= {row.env for row in settings_table()}
    for name, value in (values | given).items():
        monkeypatch.setenv(name, value.replace("$(RESTRICTED_KEY)", "s3cret"))
    settings = load_settings()
    spec, container = pod(one(documents, "Deployment", "gateway"))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {
        "http": settings.port,
        "kserve-http": settings.kserve_http_port,
        "kserve-grpc": settings.kserve_grpc_port,
        "metrics": int((settings.metrics_address or "").rpartition(":")[2]),
    }
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] >= pause + settings.drain_s + 5
    tritons = one(documents, "StatefulSet", "triton")
    # A name that leads to every pod, whether Kubernetes calls it ready or not.
    service = one([each for each in documents if each["kind"] == "Service"], "Service", "triton")
    grpc_ports = [port["port"] for port in service["spec"]["ports"] if port["name"] == "grpc"]
    assert settings.upstreams == tuple(f"dns:///{service['metadata']['name']}:{port}" for port in grpc_ports)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    found_within_s = settings.resolve_interval_s + CLUSTER_DNS_CACHE_S + HealthPolicy().backoff_limit_s
    assert tritons["spec"]["minReadySeconds"] >= found_within_s
    assert revealed(settings.repository_key) == "admin-key=s3cret"
    keys = [each for each in container["env"] if each["name"].endswith(("RESTRICTED_KEY", "REPOSITORY_KEY"))]
    assert keys == pod(tritons)[1]["env"][: len(keys)]
    served = [word for word in pod(tritons)[1]["args"] if word.startswith("--model=")]
    assert all(f"--model={model}=/checkpoint" in served for model in settings.models)


def test_tritons_command_and_ports() -> None:
    spec, container = pod(one(base(), "StatefulSet", "triton"))
    arguments = container["args"]
    own, server = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    result = CliRunner(env={"TRITONGATE_REPOSITORY_KEY": "admin-key=s3cret"}).invoke(start_triton, own)
    assert "No such option" not in result.output
    assert "/checkpoint is not a directory" in result.output
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": 8001, "metrics": METRICS_PORT}
    assert {f"--{name}-port={port}" for name, port in ports.items()} <= set(server)
    assert "--model-control-mode=none" in server
    (exits,) = (int(word.rpartition("=")[2]) for word in server if word.startswith("--exit-timeout-secs"))
    assert spec["terminationGracePeriodSeconds"] >= exits + 10


def test_compiled_kernels_are_kept_where_composes_are() -> None:
    """All else is a read-only root."""
    _, container = pod(one(base(), "StatefulSet", "triton"))
    given = {each["name"]: each.get("value") for each in container["env"]}
    kept = {name: value for name, value in given.items() if name.endswith(("_PATH", "_DIR"))}
    composes = load_compose(CHOSEN)["services"]["triton"]["environment"]
    assert kept == {name: value for name, value in composes.items() if name in kept}
    assert len(kept) == 3
    (mount,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "kernels"]
    assert all(folder.startswith(f"{mount}/") for folder in kept.values())


def test_probes_are_of_what_they_mean() -> None:
    _, triton = pod(one(base(), "StatefulSet", "triton"))
    live = triton["livenessProbe"]["exec"]["command"]
    options = triton_health._parser().parse_args(live[2:])
    assert options.stale_s >= 30
    assert options.end_process is None  # the kubelet does that
    assert options.liveness  # readiness is another probe
    assert live[1].rpartition("/")[2] == Path(triton_health.__file__).name
    grpc_port = next(port["containerPort"] for port in triton["ports"] if port["name"] == "grpc")
    assert options.grpc == f"127.0.0.1:{grpc_port}"
    assert triton["startupProbe"]["grpc"] == triton["readinessProbe"]["grpc"] == {"port": grpc_port}
    startup = triton["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 15 * 60
    _, gateway = pod(one(base(), "Deployment", "gateway"))
    assert gateway["livenessProbe"]["httpGet"]["path"] == "/health"
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/health/ready"


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_every_pod_is_confined(kind: str) -> None:
    (document,) = [each for each in base() if each["kind"] == kind]
    spec, container = pod(document)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in spec["volumes"]}


def test_only_gateways_reach_a_triton() -> None:
    policy = one(base(), "NetworkPolicy", "triton")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy
    allowed = {rule["ports"][0]["port"]: rule["from"] for rule in policy["ingress"]}
    assert set(allowed) == {"grpc", "metrics"}
    assert allowed["grpc"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "gateway"}}}]


def test_gateways_reach_tritons_and_the_dns_and_nothing_else() -> None:
    tritons, names = one(base(), "NetworkPolicy", "gateway")["spec"]["egress"]
    assert tritons["to"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "triton"}}}]
    assert tritons["ports"] == [{"port": "grpc"}]
    # TCP, too: the addresses of many Tritons do not fit into one datagram.
    assert names == {"ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]}


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_find_pods_and_ports_have_names(overlay: str) -> None:
    documents = rendered(overlay)
    pods = {
        name: one(documents, kind, name)["spec"]["template"]
        for kind, name in (("Deployment", "gateway"), ("StatefulSet", "triton"))
    }
    seen = 0
    for document in documents:
        spec = document.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector")
        if selector is None:
            continue
        labels = selector.get("matchLabels", selector)
        assert labels.items() <= pods[document["metadata"]["name"]]["metadata"]["labels"].items(), document
        ports = [each.get("targetPort", each.get("port")) for each in spec.get("ports", [])]
        ports += [each["port"] for each in spec.get("podMetricsEndpoints", [])]
        (container,) = pods[document["metadata"]["name"]]["spec"]["containers"]
        assert set(ports) <= {each["name"] for each in container["ports"]}
        seen += 1
    assert seen >= 8


@needs_kubectl
def test_what_is_scraped_has_the_jobs_of_the_rules() -> None:
    documents = rendered("many")
    alerts = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    jobs = set()
    for document in documents:
        if document["kind"] == "PodMonitor":
            kind = {"gateway": "Deployment", "triton": "StatefulSet"}[document["metadata"]["name"]]
            labels = one(documents, kind, document["metadata"]["name"])["spec"]["template"]["metadata"][
                "labels"
            ]
            jobs.add(labels[document["spec"]["jobLabel"]])
    assert jobs == set(re.findall(r'up\{job="(\w+)"\}', alerts))


@needs_kubectl
def test_scaling_follows_metrics_that_there_are() -> None:
    scaler = one(
        [each for each in rendered("many") if each["kind"] == "HorizontalPodAutoscaler"],
        "HorizontalPodAutoscaler",
        "triton",
    )
    wanted = {each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]}
    rules = yaml.safe_load((FOLDER / "overlays/many/adapter.yaml").read_text(encoding="utf-8"))
    offered = {rule.get("name", {}).get("as") or rule["seriesQuery"].partition("{")[0] for rule in rules}
    assert wanted == offered
    engine = (ROOT / "triton_models/serving/report.py").read_text(encoding="utf-8")
    read = {name for rule in rules for name in re.findall(r"tritongate_engine_(\w+?)\{", str(rule))}
    assert read == {"requests_waiting", "kv_blocks_used", "kv_blocks"}
    assert all(f'"{name}"' in engine for name in read)
