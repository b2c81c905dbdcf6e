import re
from hashlib import sha256
from pathlib import Path

import pytest

import gateway.page
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import in_process

STATIC = Path(gateway.page.__file__).with_name("static")
SERVED = [path for path in STATIC.rglob("*") if path.suffix not in {"", ".md"}]
OUTSIDE = re.compile(r"""(?:src|href|url|import|fetch|from)\s*[=(]?\s*["'`(]?https?://""")


async def test_the_page_and_its_files_under_a_strict_policy() -> None:
    async with in_process(FakeUpstream()) as served:
        for path in SERVED:
            name = path.relative_to(STATIC).as_posix()
            answer = await served.http.get("/" if name == "index.html" else f"/page/{name}")
            assert (answer.status_code, answer.content) == (200, path.read_bytes()), name
            policy = answer.headers["content-security-policy"]
            assert policy.startswith(
                "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
            )
            assert "unsafe" not in policy
            again = await served.http.get(answer.url, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await served.http.get("/")).headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize(
    "path", ["/page", "/page/index.html", "/page/vendor/README.md", "/page/..%2froutes.py"]
)
async def test_nothing_else_is_there(path: str) -> None:
    async with in_process(FakeUpstream()) as served:
        assert (await served.http.get(path)).status_code == 404


async def test_it_can_be_turned_off() -> None:
    async with in_process(FakeUpstream(), chat_page=False) as served:
        for path in ("/", "/page/app.js"):
            assert (await served.http.get(path)).status_code == 404
        assert (await served.http.get("/v1/models")).status_code == 200


async def test_it_needs_no_key_and_has_no_rights() -> None:
    keys = [{"name": "a", "key": "secret"}]
    async with in_process(FakeUpstream(), api_keys=keys) as served:
        assert (await served.http.get("/")).status_code == 200
        assert (await served.http.get("/v1/models")).status_code == 401


async def test_the_document_of_the_api_does_not_list_it() -> None:
    async with in_process(FakeUpstream()) as served:
        paths = (await served.http.get("/openapi.json")).json()["paths"]
        assert not [path for path in paths if path == "/" or path.startswith("/page")]


def test_nothing_is_loaded_from_elsewhere() -> None:
    for path in SERVED:
        text = path.read_text(encoding="utf-8")
        if path.parent == STATIC:
            assert not OUTSIDE.search(text), path
            assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|eval|style=)\b", text), path
        assert "sourceMappingURL" not in text or path.suffix == ".txt", path


def test_libraries_are_the_versions_that_are_named() -> None:
    table = (STATIC / "vendor/README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\S+)` .* `([0-9a-f]{64})` \|$", table, re.MULTILINE))
    present = {path.name: sha256(path.read_bytes()).hexdigest() for path in (STATIC / "vendor").glob("*.js")}
    assert listed == present


def test_every_text_is_there_in_each_language_and_used() -> None:
    words = (STATIC / "words.js").read_text(encoding="utf-8")
    english, chinese = (
        set(re.findall(r"(\w+): \"", block))
        for block in re.findall(r"  (?:en|zh): \{(.*?)\n  \},", words, re.DOTALL)
    )
    assert english == chinese
    rest = "".join(
        path.read_text(encoding="utf-8")
        for path in SERVED
        if path.parent == STATIC and path.name != "words.js"
    )
    used = set(re.findall(r"""(?:\bt\(|data-t[a-z-]*=|["'`(?: ])["'`]?(\w+)["'`]""", rest))
    assert english - used - {f"status{code}" for code in (401, 403, 404, 413, 503, 504)} == set()
