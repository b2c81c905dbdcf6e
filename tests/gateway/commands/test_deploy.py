import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from shlex import split
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from gateway.cli import main
from gateway.commands.deploy import MANIFESTS, Document, assemble
from gateway.settings import load_settings
from tests.deploy.test_kubernetes import needs_kubectl, one, pod, validate

FIXED = ("--instances", "2")
KEDA = ("--instances", "0:4", "--keda")
HPA = ("--instances", "2:5", "--hpa")

TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}


def closed(needed: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": needed.split(),
        "additionalProperties": False,
    }


SCALED_OBJECT = closed(
    "scaleTargetRef triggers",
    scaleTargetRef=closed("name", apiVersion={"type": "string"}, kind={"type": "string"}, name={}),
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    pollingInterval=COUNT,
    cooldownPeriod=COUNT,
    fallback=closed("failureThreshold replicas", failureThreshold=COUNT, replicas=COUNT),
    advanced=closed("", horizontalPodAutoscalerConfig=closed("", behavior={"type": "object"})),
    triggers={
        "type": "array",
        "minItems": 1,
        "items": closed(
            "type metadata",
            type={"const": "prometheus"},
            name={"type": "string"},
            metricType={"enum": ["AverageValue", "Value"]},
            metadata=closed(
                "serverAddress query threshold",
                serverAddress=TEXT,
                query=TEXT,
                threshold=TEXT,
                activationThreshold=TEXT,
            ),
        ),
    },
)
"""The fields of KEDA's v1alpha1 that the manifest has, and those of its scaler `prometheus`."""

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="LEFT OUT: promtool is not installed, so what KEDA asks was not tried (apt install prometheus)",
)


def written(*arguments: str) -> list[Document]:
    done = CliRunner().invoke(main, ["deploy", "--model", "m=weights", *arguments])
    assert done.exit_code == 0, done.output
    return list(yaml.safe_load_all(done.output))


def refusal(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["deploy", *arguments])
    assert done.exit_code == 2, done.output
    return done.output


@pytest.mark.parametrize("arguments", [FIXED, KEDA, HPA, ("--gpu", "0", "--cpu", "500m", "--memory", "2Gi")])
def test_kubernetes_takes_what_is_written(arguments: tuple[str, ...], tmp_path: Path) -> None:
    documents = written(*arguments)
    scaled = [each for each in documents if each["kind"] == "ScaledObject"]
    assert len(scaled) == ("--keda" in arguments)
    for each in scaled:
        jsonschema.validate(each["spec"], SCALED_OBJECT)
        # KEDA makes an HPA of it, with this behaviour.
        hpa = one(written(*HPA), "HorizontalPodAutoscaler", "triton")
        hpa["spec"]["behavior"] = each["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        validate(yaml.safe_dump(hpa), tmp_path)
    others = [each for each in documents if each not in scaled]
    assert validate(yaml.safe_dump_all(others), tmp_path).count("passed for resource") == len(others)
    assert {each["metadata"]["namespace"] for each in documents} == {"tritongate"}


@needs_kubectl
@pytest.mark.parametrize("name", ["12e-3", "1.e5", "0o17", "y"])
def test_names_are_text_for_kubernetes_whatever_they_look_like(name: str, tmp_path: Path) -> None:
    """Its reader knows numbers and truth that PyYAML does not."""
    arguments = ("--model", f"{name}={name}", "--out", str(tmp_path))
    assert CliRunner().invoke(main, ["deploy", *arguments]).exit_code == 0
    command = ["kubectl", "annotate", "--local", "--filename", tmp_path, "a=b", "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f'"TRITONGATE_MODELS": "{name}"' in done.stdout
    assert f'"claimName": "{name}"' in done.stdout


def test_the_check_of_kedas_fields_can_fail() -> None:
    spec = one(written(*KEDA), "ScaledObject", "triton")["spec"]
    spec["triggers"][0]["metadata"]["threshhold"] = "8"
    with pytest.raises(jsonschema.ValidationError, match="threshhold"):
        jsonschema.validate(spec, SCALED_OBJECT)


@needs_kubectl
@pytest.mark.parametrize("folder", ["base", "hpa", "keda", "gateways"])
def test_manifests_are_put_together_as_by_kustomize(folder: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", MANIFESTS / folder], capture_output=True, text=True, check=True
    )
    theirs = list(yaml.safe_load_all(done.stdout))
    config = next((each["metadata"]["name"] for each in theirs if each["kind"] == "ConfigMap"), "gateway-")

    def comparable(documents: list[Document]) -> list[str]:
        texts = [json.dumps(each, sort_keys=True) for each in documents]
        return sorted(text.replace(f'"{config}"', '"gateway"') for text in texts)

    assert comparable(assemble(folder)) == comparable(theirs)


def test_sizes_and_models() -> None:
    arguments = ("--model", "n=more", "--cpu", "8", "--memory", "64Gi", "--instances", "3")
    documents = written(*arguments, "--image", "r/g:1", "--triton-image", "r/t:2")
    triton = one(documents, "StatefulSet", "triton")
    assert triton["spec"]["replicas"] == 3
    spec, container = pod(triton)
    assert container["image"] == "r/t:2"
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "1"},
    }
    assert container["args"][:3] == [
        "--model=m=/checkpoints/m",
        "--model=n=/checkpoints/n",
        "--device=cuda:0",
    ]
    mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert volumes.keys() == set(mounted.values())
    claims = [volumes[mounted[f"/checkpoints/{name}"]]["persistentVolumeClaim"] for name in "mn"]
    assert claims == [{"claimName": name, "readOnly": True} for name in ("weights", "more")]
    assert pod(one(documents, "Deployment", "gateway"))[1]["image"] == "r/g:1"


def test_without_a_gpu() -> None:
    _, container = pod(one(written("--gpu", "0"), "StatefulSet", "triton"))
    assert "--device=cpu" in container["args"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_the_configuration_is_settings_and_a_new_one_makes_new_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = written(*KEDA, "--model", "n=more")
    config = one(documents, "ConfigMap", "gateway")
    _, container = pod(one(documents, "Deployment", "gateway"))
    assert container["envFrom"] == [{"configMapRef": {"name": config["metadata"]["name"]}}]
    assert config["metadata"]["name"] != one(written(*KEDA), "ConfigMap", "gateway")["metadata"]["name"]
    for name, value in config["data"].items():
        monkeypatch.setenv(name, value)
    # Known by name, they are served by nobody yet, and not unknown.
    assert load_settings({"allow_anonymous": "true"}).models.keys() == {"m", "n"}


@pytest.mark.parametrize("arguments", [KEDA, HPA])
def test_a_scaler_owns_the_number(arguments: tuple[str, ...]) -> None:
    documents = written(*arguments)
    for kind, name in (("StatefulSet", "triton"), ("Deployment", "gateway")):
        assert "replicas" not in one(documents, kind, name)["spec"]
    least, most = map(int, arguments[1].split(":"))
    if arguments is KEDA:
        spec = one(documents, "ScaledObject", "triton")["spec"]
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (least, most)
        assert spec["fallback"]["replicas"] == 1
    else:
        spec = one(documents, "HorizontalPodAutoscaler", "triton")["spec"]
        assert (spec["minReplicas"], spec["maxReplicas"]) == (least, most)
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "triton"}


def test_a_gateway_without_a_triton_is_reached_where_there_may_be_none() -> None:
    """Or nobody could ask for the first one."""
    for arguments, path in ((KEDA, "/health"), (HPA, "/health/ready"), (FIXED, "/health/ready")):
        _, container = pod(one(written(*arguments), "Deployment", "gateway"))
        assert container["readinessProbe"]["httpGet"]["path"] == path
        config = next(each for each in written(*arguments) if each["kind"] == "ConfigMap")
        assert ("TRITONGATE_UPSTREAM_WAIT_S" in config["data"]) == (path == "/health")


def test_nodes_can_be_drained_of_a_lone_pod() -> None:
    def budgets(*arguments: str) -> dict[str, dict[str, Any]]:
        documents = [each for each in written(*arguments) if each["kind"] == "PodDisruptionBudget"]
        return {each["metadata"]["name"]: each["spec"] for each in documents}

    for arguments, triton, gateway in (
        (("--instances", "1"), "maxUnavailable", "maxUnavailable"),
        (KEDA, "maxUnavailable", "minAvailable"),
        (HPA, "minAvailable", "minAvailable"),
    ):
        found = budgets(*arguments)
        assert found["triton"].keys() == {"selector", triton}
        assert found["gateway"].keys() == {"selector", gateway}


def test_keda_asks_that_prometheus_about_that_namespace() -> None:
    scaler = one(
        written(*KEDA, "--namespace", "llm", "--prometheus", "http://p:9090"), "ScaledObject", "triton"
    )
    assert scaler["metadata"]["namespace"] == "llm"
    for trigger in scaler["spec"]["triggers"]:
        assert trigger["metadata"]["serverAddress"] == "http://p:9090"
        assert 'namespace="llm"' in trigger["metadata"]["query"]
        assert 'tritongate"' not in trigger["metadata"]["query"]


AT_10M = {"waiting": 2 + 1 + 3 + 1, "running": 5 + 6 + 1}
QUIET = 'tritongate_requests_total{namespace="tritongate",model="m",pod="a",status="200"}'
TOLD: dict[str, tuple[dict[str, str], Mapping[str, float]]] = {
    "nothing is known": ({}, {"waiting": 0, "running": 0}),
    "nobody asks": ({QUIET: "7x20"}, {"waiting": 0, "running": 0}),
    "the first request was refused": (
        {QUIET.replace("200", "503"): "_x18 1 1"},
        {"waiting": 0, "running": 1},
    ),
    "probes and unknown models": (
        {QUIET.replace('"m"', '"unknown"'): "0+9x20"},
        {"waiting": 0, "running": 0},
    ),
    "another namespace": ({QUIET.replace('"tritongate"', '"x"'): "0+9x20"}, {"waiting": 0, "running": 0}),
    "a gateway was replaced": ({QUIET: "50x14 3x6"}, {"waiting": 0, "running": 0}),
    "two gateways, two engines that both report": (
        {
            QUIET: "0+9x20",
            'tritongate_requests_waiting{namespace="tritongate",model="m",pod="a"}': "2x20",
            'tritongate_requests_waiting{namespace="tritongate",model="m",pod="b"}': "1x20",
            'tritongate_requests_in_flight{namespace="tritongate",model="m",pod="a"}': "5x20",
            'tritongate_requests_in_flight{namespace="tritongate",model="m",pod="b"}': "6x20",
            **{
                "tritongate_upstream_requests_waiting"
                f'{{namespace="tritongate",model="m",upstream="{engine}",pod="{pod}"}}': f"{waiting}x20"
                for engine, waiting in (("x:1", 3), ("y:1", 1))
                for pod in "ab"
            },
        },
        AT_10M,
    ),
}


@needs_promtool
@pytest.mark.parametrize("case", TOLD)
def test_what_prometheus_answers_keda(case: str, tmp_path: Path) -> None:
    series, expected = TOLD[case]
    triggers = one(written(*KEDA), "ScaledObject", "triton")["spec"]["triggers"]
    tests = [
        {
            "expr": each["metadata"]["query"],
            "eval_time": "10m",
            "exp_samples": [{"labels": "{}", "value": value}],
        }
        for each in triggers
        for value in [expected[each["name"]]]
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    group = {"interval": "30s", "input_series": given, "promql_expr_test": tests}
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [], "tests": [group]}), encoding="utf-8")
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_are_replaced_and_what_is_left_is_named(tmp_path: Path) -> None:
    out = tmp_path / "manifests"
    command = ["deploy", "--model", "m=weights", "--out", str(out)]
    first = CliRunner().invoke(main, [*command, *KEDA])
    assert first.exit_code == 0, first.output
    assert {Path(line) for line in first.output.splitlines()} == set(out.iterdir())
    second = CliRunner().invoke(main, [*command, "--model", "n=more", *HPA])
    assert [line for line in second.stderr.splitlines() if "triton-scaledobject.yaml" in line]
    documents = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in out.glob("*.yaml")]
    assert len([each for each in documents if each["kind"] == "ConfigMap"]) == 1
    (out / "x").write_text("", encoding="utf-8")
    third = CliRunner().invoke(main, ["deploy", "--model", "m=weights", "--out", str(out / "x" / "y")])
    assert third.exit_code == 1
    assert "Not a directory" in third.output


@pytest.mark.parametrize("page", ["kubernetes.md", "kubernetes.zh.md"])
def test_the_printed_example_works_as_it_stands(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (MANIFESTS.parents[1] / "docs" / page).read_text(encoding="utf-8")
    (example,) = re.findall(r"`tritongate (deploy --model [^`]+)`", text)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, split(example))
    assert done.exit_code == 0, done.output
    (out,) = tmp_path.iterdir()
    assert f"`kubectl apply -f {out.name}`" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing option '--model'"),
        (("--model", "m"), "NAME=CLAIM"),
        (("--model", "m/n=c"), "NAME=CLAIM"),
        (("--model", "m=C"), "'C' is no name of a volume claim"),
        (("--model", "m="), "NAME=CLAIM"),
        (("--model", "m=a", "--model", "m=b"), "m is there twice"),
        (("--model", "m=c", "--instances", "3:2"), "MIN:MAX"),
        (("--model", "m=c", "--instances", "0"), "MIN:MAX"),
        (("--model", "m=c", "--instances", "many"), "MIN:MAX"),
        (("--model", "m=c", "--instances", "1:2"), "needs --keda or --hpa"),
        (("--model", "m=c", "--instances", "2:2", "--keda"), "give it a range"),
        (("--model", "m=c", "--instances", "0:2", "--hpa"), "does not scale to zero"),
        (("--model", "m=c", "--instances", "1:2", "--keda", "--hpa"), "Either --keda or --hpa"),
        (("--model", "m=c", "--prometheus", "http://p"), "--prometheus is for --keda"),
        (("--model", "m=c", "--cpu", "much"), "'much' is no number of cores"),
        (("--model", "m=c", "--memory", "24 GB"), "'24 GB' is no amount of memory"),
        (("--model", "m=c", "--gpu", "2"), "--gpu"),
        (("--model", "m=c", "--namespace", "A"), "'A' is no name of a namespace"),
        (("--model", "m=c", "--image", "a b"), "'a b' is no name of an image"),
        (("--model", "m=c", "--triton-image", ""), "'' is no name of an image"),
        (("--model", "m=c", "--keda", "--prometheus", "p:9090"), "'p:9090' is no URL"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], said: str) -> None:
    assert said in refusal(*arguments)
