"""The dashboards' GPU panels, asked of a Prometheus that scrapes what a GPU host exported.

Every recording under deploy/grafana/recorded/ is tried.
"""

import http.server
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy.grafana.__main__ import FOLDER as DASHBOARDS
from deploy.grafana.record import main
from tests.deploy.prometheus_client import Prometheus, panels
from tests.e2e.up_process import wait_until
from tests.ports import free_ports
from tests.tied import tied

RECORDED = DASHBOARDS.parent / "recorded"
RECORDINGS = sorted(path.parent for path in RECORDED.glob("*/triton.prom"))
GPU = [
    (title, expr) for title, exprs in panels(DASHBOARDS / "engine.json") for expr in exprs if "nv_gpu" in expr
]
EXPORTED = '# HELP nv_gpu_utilization GPU utilization rate\nnv_gpu_utilization{gpu_uuid="GPU-1"} 0.5\n'


class Exporter(http.server.ThreadingHTTPServer):
    """Answers everything with one text."""

    def __init__(self, text: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.text = text
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Exporter

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(self.server.text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    server = Exporter(EXPORTED)
    yield server
    server.close()


def test_a_recording_is_what_was_exported(exporter: Exporter, tmp_path: Path) -> None:
    arguments = [str(tmp_path / "out"), "--where", "one GPU", "--gateway", exporter.address]
    result = CliRunner().invoke(main, [*arguments, "--triton", exporter.address])
    assert result.exit_code == 0, result.output
    for name in ("gateway.prom", "triton.prom"):
        first, rest = (tmp_path / "out" / name).read_text().split("\n", 1)
        assert first.startswith("# Recorded 2")
        assert first.endswith(": one GPU")
        assert rest == EXPORTED


def test_there_are_gpu_panels() -> None:
    assert {expr for _, expr in GPU} >= {"nv_gpu_utilization", "nv_gpu_memory_used_bytes"}


def test_there_is_a_recording() -> None:
    assert RECORDINGS, "without one no GPU panel would be asked"


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="LEFT OUT: Prometheus is not installed")
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.name)
def test_every_gpu_panel_shows_something(recording: Path, tmp_path: Path) -> None:
    exporter = Exporter((recording / "triton.prom").read_text(encoding="utf-8"))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs:\n"
        f"  - {{job_name: triton, static_configs: [{{targets: ['{exporter.address}']}}]}}\n"
    )
    flags = [
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address={address}",
    ]
    process = subprocess.Popen(tied("prometheus", *flags), stderr=subprocess.DEVNULL)
    client = Prometheus(address)
    try:
        wait_until(lambda: client.answers() and client.series("nv_gpu_utilization", seconds=60))
        empty = [title for title, expr in GPU if not client.series(expr, seconds=60)]
        assert not empty
    finally:
        client.close()
        process.terminate()
        process.wait()
        exporter.close()
