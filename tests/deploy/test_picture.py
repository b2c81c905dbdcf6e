"""The pictures in the documents, and the data that they are of."""

import http.server
import json
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy.grafana.history import PANELS
from deploy.grafana.history import main as keep
from deploy.grafana.picture import main as draw

PICTURES = Path(__file__).parents[2] / "deploy" / "grafana" / "pictures"
ROOT = PICTURES.parents[2]


class FakePrometheus(http.server.ThreadingHTTPServer):
    """Has one series, with a gap, for every query."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, str]] = []


class Handler(http.server.BaseHTTPRequestHandler):
    server: FakePrometheus

    def do_GET(self) -> None:
        asked = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        self.server.asked.append(asked)
        start = int(asked["start"])
        values = [[start, "1"], [start + 10, "NaN"], [start + 20, "0.123456789"]]
        document = {"data": {"result": [{"metric": {"model": "glm", "status": "200"}, "values": values}]}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def prometheus() -> Iterator[FakePrometheus]:
    with FakePrometheus() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_what_is_kept(prometheus: FakePrometheus, tmp_path: Path) -> None:
    out = tmp_path / "data.json"
    address = f"127.0.0.1:{prometheus.server_address[1]}"
    result = CliRunner().invoke(
        keep, [address, str(out), "--where", "here", "--seconds", "60", "--step", "10"]
    )
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text(encoding="utf-8"))
    assert [panel["title"] for panel in document["panels"]] == [title for _, title in PANELS]
    first = document["panels"][0]
    assert first["series"][0] == {"name": "200", "points": [[0, 1.0], [20, 0.12346]]}
    for asked in prometheus.asked:
        assert "$" not in asked["query"]
        assert asked["step"] == "10"
        assert int(asked["end"]) - int(asked["start"]) == 60
        assert abs(int(asked["end"]) - time.time()) < 60
    assert CliRunner().invoke(draw, [str(out), str(tmp_path / "x.svg")]).exit_code == 0


@pytest.mark.parametrize("data", sorted(PICTURES.glob("*.json")), ids=lambda path: path.stem)
def test_the_pictures_are_of_their_data(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "picture.svg"
    result = CliRunner().invoke(draw, [str(data), str(out)])
    assert result.exit_code == 0, result.output
    made, committed = (path.read_text(encoding="utf-8") for path in (out, data.with_suffix(".svg")))
    assert made == committed
    assert "drawn with matplotlib" in made
    shown = str(data.with_suffix(".svg").relative_to(ROOT))
    assert all(
        shown in (ROOT / "docs" / page).read_text(encoding="utf-8")
        for page in ("kubernetes.md", "kubernetes.zh.md")
    )
