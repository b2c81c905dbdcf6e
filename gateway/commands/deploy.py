"""`tritongate deploy`: the manifests for Kubernetes, with sizes and scaling filled in.

The manifests in `gateway/manifests` are the only ones: here they are put together as kustomize does it, for
what they use of it, and then changed by what the command was asked for. Contacts no cluster.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import click
import yaml

MANIFESTS: Final = Path(__file__).parent.parent / "manifests"

Document = dict[str, Any]
Scaler = Literal["keda", "hpa"]

_NAMESPACE: Final = "tritongate"
_UNTIL_STARTED_S: Final = "540"
"""How long a request waits for the first Triton: less than the 600 s that it has in all."""
_CPU = re.compile(r"[0-9]+(\.[0-9]+)?|[0-9]+m")
_MEMORY = re.compile(r"[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_CLAIM = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_URL = re.compile(r"https?://[^\s/]\S*")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class _Dumper(yaml.SafeDumper):
    """Quotes also what only Kubernetes' reader takes for a number, or for true or false."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("[yYnN]$"), list("yYnN"))
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?$"), list("-+.0123456789")
)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile("0o[0-7]+$"), ["0"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be deployed; quantities are written as Kubernetes does."""

    models: Mapping[str, str]
    """For each model's name, the volume claim that holds its checkpoint."""
    cpu: str
    """Of a Triton's pod, as its memory."""
    memory: str
    gpu: int
    """How many a Triton has: one or none."""
    least: int
    """Tritons, as `most`."""
    most: int
    scaler: Scaler | None
    """None: their number is fixed."""
    namespace: str = _NAMESPACE
    images: Mapping[str, str] = field(default_factory=dict)
    """Other images than the manifests', by the names that those have for them."""
    prometheus: str | None = None
    """URL of the Prometheus that KEDA asks; None: the manifest's."""


def assemble(*folders: str) -> list[Document]:
    """Return the documents of some folders of the manifests, each with its kustomization applied."""
    return [document for folder in folders for document in _folder(MANIFESTS / folder)]


def _folder(folder: Path) -> Iterator[Document]:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    documents = [
        document
        for name in kustomization["resources"]
        for document in yaml.safe_load_all((folder / name).read_text(encoding="utf-8"))
    ]
    images = {each["name"]: f"{each['newName']}:{each['newTag']}" for each in kustomization.get("images", ())}
    for generator in kustomization.get("configMapGenerator", ()):
        data = dict(literal.split("=", 1) for literal in generator["literals"])
        name = {"name": generator["name"]}
        documents.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": name, "data": data})
    labels = {name: text for each in kustomization.get("labels", ()) for name, text in each["pairs"].items()}
    for document in documents:
        template = document.get("spec", {}).get("template")
        for labelled in (document, *([] if template is None else [template])):
            if labels:
                labelled["metadata"].setdefault("labels", {}).update(labels)
        if template is not None:
            (container,) = template["spec"]["containers"]
            container["image"] = images[container["image"]]
        yield document


def render(plan: Plan) -> list[Document]:
    """Return the documents for `plan`."""
    scaling = () if plan.scaler is None else ("gateways", plan.scaler)
    documents = assemble("base", *scaling)
    named = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    gateway, triton = named["Deployment", "gateway"], named["StatefulSet", "triton"]
    _size(triton, plan)
    _mount(triton, plan.models)
    for workload in (gateway, triton):
        if plan.scaler is not None:
            del workload["spec"]["replicas"]  # the scaler's: it would be set back at each apply
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        container["image"] = plan.images.get(workload["metadata"]["name"], container["image"])
    if plan.scaler is None:
        triton["spec"]["replicas"] = plan.least
        _let_go(named["PodDisruptionBudget", "gateway"])
    else:
        kind = {"keda": "ScaledObject", "hpa": "HorizontalPodAutoscaler"}[plan.scaler]
        _scale(named[kind, "triton"]["spec"], plan)
    if plan.least == 0:
        # Without a Triton no gateway is ready, and one that is not ready would never get the request that
        # a Triton is started for.
        (container,) = gateway["spec"]["template"]["spec"]["containers"]
        container["readinessProbe"]["httpGet"]["path"] = "/health"
        named["ConfigMap", "gateway"]["data"]["TRITONGATE_UPSTREAM_WAIT_S"] = _UNTIL_STARTED_S
    if plan.least <= 1:
        _let_go(named["PodDisruptionBudget", "triton"])
    _configure(named["ConfigMap", "gateway"], gateway, plan.models)
    for document in documents:
        document["metadata"]["namespace"] = plan.namespace
    return documents


def _size(triton: Document, plan: Plan) -> None:
    (container,) = triton["spec"]["template"]["spec"]["containers"]
    limits = {"memory": plan.memory} | ({"nvidia.com/gpu": "1"} if plan.gpu else {})
    container["resources"] = {"requests": {"cpu": plan.cpu, "memory": plan.memory}, "limits": limits}
    if not plan.gpu:
        container["args"] = [each.replace("--device=cuda:0", "--device=cpu") for each in container["args"]]


def _mount(triton: Document, models: Mapping[str, str]) -> None:
    """Give the Tritons each model's checkpoint."""
    spec = triton["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    arguments = [each for each in container["args"] if not each.startswith("--model=")]
    container["args"] = [*(f"--model={name}=/checkpoints/{name}" for name in models), *arguments]
    mounts = [each for each in container["volumeMounts"] if each["name"] != "checkpoint"]
    volumes = [each for each in spec["volumes"] if each["name"] != "checkpoint"]
    for number, (name, claim) in enumerate(models.items()):
        volume = f"checkpoint-{number}"
        mounts.append({"name": volume, "mountPath": f"/checkpoints/{name}", "readOnly": True})
        volumes.append({"name": volume, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    container["volumeMounts"], spec["volumes"] = mounts, volumes


def _let_go(budget: Document) -> None:
    """Let a drain of nodes take the only pod: otherwise it would wait for ever."""
    del budget["spec"]["minAvailable"]
    budget["spec"]["maxUnavailable"] = 1


def _scale(scaler: Document, plan: Plan) -> None:
    if plan.scaler == "hpa":
        scaler |= {"minReplicas": plan.least, "maxReplicas": plan.most}
        return
    scaler |= {"minReplicaCount": plan.least, "maxReplicaCount": plan.most}
    scaler["fallback"]["replicas"] = max(plan.least, 1)
    for trigger in scaler["triggers"]:
        metadata = trigger["metadata"]
        metadata["query"] = metadata["query"].replace(
            f'namespace="{_NAMESPACE}"', f'namespace="{plan.namespace}"'
        )
        metadata["serverAddress"] = plan.prometheus or metadata["serverAddress"]


def _configure(config: Document, gateway: Document, models: Mapping[str, str]) -> None:
    """Name the models, which are then known while there is no Triton; new values make new pods."""
    config["data"]["TRITONGATE_MODELS"] = ",".join(models)
    digest = hashlib.sha256(json.dumps(config["data"], sort_keys=True).encode()).hexdigest()
    config["metadata"]["name"] = name = f"gateway-{digest[:10]}"
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    container["envFrom"] = [{"configMapRef": {"name": name}}]


def _as_yaml(documents: list[Document]) -> str:
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=110))


def _file_name(document: Document) -> str:
    # Without the digest in a ConfigMap's name: the next one replaces it.
    return f"{document['metadata']['name'].partition('-')[0]}-{document['kind'].lower()}.yaml"


def _matching(pattern: re.Pattern[str], what: str) -> Any:
    def check(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None and not pattern.fullmatch(value):
            raise click.BadParameter(f"{value!r} is no {what}")
        return value

    return check


def _models(_context: click.Context, _parameter: click.Parameter, given: Sequence[str]) -> dict[str, str]:
    models: dict[str, str] = {}
    for each in given:
        name, _, claim = each.partition("=")
        if not (_MODEL.fullmatch(name) and claim):
            raise click.BadParameter(
                f"{each!r} is not NAME=CLAIM, a model's name and the volume claim with its checkpoint"
            )
        if not _CLAIM.fullmatch(claim):
            raise click.BadParameter(
                f"{claim!r} is no name of a volume claim: these have lower-case letters, digits, - and ."
            )
        if name in models:
            raise click.BadParameter(f"{name} is there twice")
        models[name] = claim
    return models


def _instances(_context: click.Context, _parameter: click.Parameter, given: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,4})(?::([0-9]{1,4}))?", given)
    least, most = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
    if not 1 <= most >= least:
        raise click.BadParameter(f"{given!r} is neither a number from 1 nor MIN:MAX, the smaller one first")
    return least, most


@click.command(short_help="Write manifests for Kubernetes.")
@click.option(
    "--model",
    "models",
    multiple=True,
    required=True,
    callback=_models,
    metavar="NAME=CLAIM",
    help="model to serve, and the volume claim whose root is its checkpoint; repeatable",
)
@click.option("--cpu", default="4", show_default=True, callback=_matching(_CPU, "number of cores"))
@click.option("--memory", default="24Gi", show_default=True, callback=_matching(_MEMORY, "amount of memory"))
@click.option(
    "--gpu",
    type=click.IntRange(0, 1),
    default=1,
    show_default=True,
    help="GPUs of a Triton: a second one is a second instance's",
)
@click.option(
    "--instances",
    default="1",
    show_default=True,
    callback=_instances,
    metavar="N|MIN:MAX",
    help="number of Tritons; MIN:MAX scales them, from 0 with --keda",
)
@click.option("--keda", is_flag=True, help="scale by KEDA: running and waiting requests")
@click.option("--hpa", is_flag=True, help="scale without KEDA: waiting requests, KV pressure")
@click.option(
    "--prometheus",
    metavar="URL",
    callback=_matching(_URL, "URL such as http://prometheus:9090"),
    help="Prometheus that KEDA asks, which scrapes the gateways' /metrics",
)
@click.option(
    "--namespace",
    default=_NAMESPACE,
    show_default=True,
    callback=_matching(_DNS_LABEL, "name of a namespace"),
)
@click.option(
    "--image",
    metavar="IMAGE",
    callback=_matching(_IMAGE, "name of an image"),
    help="the gateway's, with its registry and tag",
)
@click.option(
    "--triton-image",
    metavar="IMAGE",
    callback=_matching(_IMAGE, "name of an image"),
    help="Triton's, with its registry and tag",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="folder for a file per object; without it they are written to standard output",
)
def deploy(
    *,
    instances: tuple[int, int],
    keda: bool,
    hpa: bool,
    prometheus: str | None,
    image: str | None,
    triton_image: str | None,
    out: Path | None,
    **same: Any,
) -> None:
    """Write manifests for Kubernetes: gateways, Tritons, and what scales them; `kubectl apply -f` takes them.

    The secrets `gateway` and `triton` and the volume claims are yours to create: docs/kubernetes.md says how.
    """
    least, most = instances
    if keda and hpa:
        raise click.UsageError("Either --keda or --hpa scales the Tritons.")
    scaler: Scaler | None = "keda" if keda else "hpa" if hpa else None
    if least == most and scaler is not None:
        raise click.UsageError(f"--{scaler} scales; give it a range, such as --instances {least}:{most + 1}")
    if least != most and scaler is None:
        raise click.UsageError("A range of --instances needs --keda or --hpa.")
    if least == 0 and scaler == "hpa":
        raise click.UsageError("An HPA does not scale to zero: use --keda, or a MIN of at least 1.")
    if prometheus is not None and scaler != "keda":
        raise click.UsageError("--prometheus is for --keda.")
    given = {"gateway": image, "triton": triton_image}
    images = {name: value for name, value in given.items() if value is not None}
    plan = Plan(least=least, most=most, scaler=scaler, images=images, prometheus=prometheus, **same)
    documents = render(plan)
    if out is None:
        click.echo(_as_yaml(documents), nl=False)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        files = {out / _file_name(document): document for document in documents}
        for path, document in files.items():
            path.write_text(_as_yaml([document]), encoding="utf-8")
            click.echo(path)
        for path in sorted(set(out.glob("*.yaml")) - files.keys()):
            click.echo(f"Warning: {path} is not of this deployment", err=True)
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from None
