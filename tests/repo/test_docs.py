"""The documents hold: the site builds and asks no other host, links lead somewhere, tables are the code's."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from prometheus_client.metrics import MetricWrapperBase

from gateway.telemetry.bulk import BulkCounter, BulkHistogram
from gateway.telemetry.metrics import Metrics, UpstreamStates, _joined
from tests.repo.test_architecture import leads_somewhere
from tests.repo.test_readme import check_table
from triton_models.serving import report

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FRONT = [
    ROOT / name
    for name in (
        "README.md",
        "README.zh.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "CONTRIBUTING.md",
        "examples/README.md",
        "bench/LOG.md",
        *(f"bench/log/{path.name}" for path in (ROOT / "bench/log").glob("*.md")),
        "bench/gpu/README.md",
        "tests/golden/README.md",
    )
]


@pytest.mark.parametrize("page", [*PAGES, *FRONT], ids=lambda page: page.name)
def test_every_link_leads_to_a_heading(page: Path) -> None:
    links = re.findall(r"\]\((?![a-z]+:)([^)#\s]*)#?([^)]*)\)", page.read_text(encoding="utf-8"))
    assert {
        link for link in links if not leads_somewhere(page.parent / link[0] if link[0] else page, link[1])
    } == set()


@pytest.mark.parametrize("page", [*PAGES, *FRONT], ids=lambda page: page.name)
def test_no_merge_was_left_half_done(page: Path) -> None:
    assert not re.search(r"^(<{7}|={7}|>{7})( |$)", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_page_is_in_both_languages() -> None:
    chinese = {page.name.replace(".zh.md", ".md") for page in PAGES if page.name.endswith(".zh.md")}
    english = {page.name for page in PAGES if not page.name.endswith(".zh.md")}
    assert chinese == english


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.zh.md")), ids=lambda page: page.name)
def test_both_languages_have_the_same_outline_and_commands(page: Path) -> None:
    english = page.with_name(page.name.replace(".zh.md", ".md"))
    chinese_shape, english_shape = (shape(each.read_text(encoding="utf-8")) for each in (page, english))
    assert chinese_shape == english_shape


def shape(text: str) -> list[str]:
    """Return the levels of the headings and the languages of the blocks, in their order."""
    text = re.sub(r"(?m)^<!-- section: (.*) -->$", lambda mark: section(mark[1]), text)
    return re.findall(r"(?m)^(#{1,4}(?= \S)|```\w*)", text)


def section(heading: str) -> str:
    """Return the section of ARCHITECTURE.md that the site shows on a page of its own."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_the_readme_is_short(readme: str) -> None:
    assert len((ROOT / readme).read_text(encoding="utf-8").splitlines()) <= 200


def test_the_architecture_is_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 300


def test_the_newest_release_and_the_images_have_the_packages_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    releases = re.findall(r"(?m)^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert releases[0] == version
    deployed = ("docker-compose.yml", "gateway/manifests/base/kustomization.yaml")
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in deployed)
    tags = re.findall(r"(?:image: tritongate[\w-]*:|newTag: )([\d.]+)", text)
    assert len(tags) >= 5
    assert set(tags) == {version}


def metrics_as_documented() -> str:
    """Return the tables of the gateway's and of the engine's metrics, made from the code."""
    rows = ["| metric | kind | labels | |", "| --- | --- | --- | --- |"]
    for metric in vars(Metrics()).values():
        if isinstance(metric, BulkHistogram | BulkCounter):
            bulk = next(iter(metric.collect()))
            name = f"{bulk.name}_total" if bulk.type == "counter" else bulk.name
            rows.append(f"| `{name}` | {bulk.type} | `model` | {bulk.documentation} |")
        if isinstance(metric, UpstreamStates):
            labels = " ".join(f"`{label}`" for label in metric.LABELS)
            rows += [
                f"| `{each.name}` | gauge | {labels} | {each.documentation} |" for each in metric.collect()
            ]
        if isinstance(metric, MetricWrapperBase):
            family = next(iter(metric.collect()))
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = " ".join(f"`{label}`" for label in metric._labelnames)
            rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    up, *_ = _joined([])
    rows.append(f"| `{up.name}` | gauge | `worker` | {up.documentation} |")
    engine = [
        *((name, "counter", text) for name, text in report._COUNTERS.items()),
        ("requests_total", "counter", "Requests ended, by reason (label `finish_reason`)"),
        *((name, "gauge", text) for name, text in report._GAUGES.items()),
        *((name, "histogram", text) for name, (text, _) in report._HISTOGRAMS.items()),
    ]
    rows += ["", "| metric of the engine | kind | |", "| --- | --- | --- |"]
    rows += [f"| `{report.PREFIX}{name}` | {kind} | {text} |" for name, kind, text in engine]
    return "\n".join(rows)


@pytest.mark.parametrize("page", ["metrics.md", "metrics.zh.md"])
def test_the_metrics_tables_are_the_metrics(page: str) -> None:
    check_table(DOCS / page, "metrics", metrics_as_documented())


def test_the_site_builds_and_asks_no_other_host(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert {"index.html", "settings.html"} <= {page.name for page in pages}
    assert (tmp_path / "zh" / "settings.html").exists()
    asked = {
        address
        for page in pages
        for tag in re.findall(r"<(?:script|img|link|iframe|source)\b[^>]*>", page.read_text(encoding="utf-8"))
        for address in re.findall(r'(?:src|href)="?((?:https?:)?//[^"\s>]+)', tag)
    }
    assert asked == set()
