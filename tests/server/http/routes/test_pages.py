"""The playground and the dashboard as files: who gets them, their headers, sizes, and the vendored parts' hashes."""

import hashlib
import re
from pathlib import Path

import httpx
import pytest
from helpers.server.fake_engine import FakeEngine, app_for, client_of

from tightwire.server.config.serve import HttpOptions
from tightwire.server.http.routes.pages import web_files

_WEB = Path(__file__).parents[4] / "server" / "web"
_BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
_MAX_PAGE_BYTES = 120_000
_MAX_LINES = 250
_REFERENCE = re.compile(r"""(?:src|href)="/web/([^"]+)"|from "(\.[^"]+)\"""")


def _loaded_by(page: str) -> set[str]:
    """Everything that a browser loads for a page, over all imports."""
    loaded, new = set[str](), {page}
    while new:
        loaded |= new
        new = {name for path in new for name in _references(path)} - loaded
    return loaded


def _references(path: str) -> set[str]:
    if path.startswith("vendor/"):
        return set()
    found = _REFERENCE.findall((_WEB / path).read_text())
    return {
        absolute or ((_WEB / path).parent / relative).resolve().relative_to(_WEB).as_posix()
        for absolute, relative in found
    }


async def test_browsers_get_the_pages(client: httpx.AsyncClient) -> None:
    for url, title in (("/", "Tightwire playground"), ("/dashboard", "Tightwire dashboard")):
        response = await client.get(url, headers=_BROWSER)
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert f"<title>{title}</title>" in response.text


async def test_curl_gets_text_and_programs_get_json(client: httpx.AsyncClient) -> None:
    curl = await client.get("/", headers={"user-agent": "curl/8.5.0", "accept": "*/*"})
    assert curl.headers["content-type"] == "text/plain; charset=utf-8"
    assert "tiny: ready." in curl.text and "curl http://test/v1/chat/completions" in curl.text
    asked = await client.get("/", headers={"user-agent": "curl/8.5.0", "accept": "application/json"})
    assert asked.json()["model"] == "tiny" and asked.headers["vary"] == "accept, user-agent"


@pytest.mark.parametrize("page", ["index.html", "dashboard.html"])
async def test_a_page_and_all_that_it_loads_is_served_and_small(client: httpx.AsyncClient, page: str) -> None:
    loaded = _loaded_by(page)
    assert len(loaded) > 10
    answers = [await client.get(f"/web/{path}") for path in loaded]
    assert {answer.status_code for answer in answers} == {200}
    assert sum(len(answer.content) for answer in answers) < _MAX_PAGE_BYTES


def test_every_served_file_is_used() -> None:
    assert set(web_files()) == _loaded_by("index.html") | _loaded_by("dashboard.html")


async def test_the_security_policy_allows_own_files_only(client: httpx.AsyncClient) -> None:
    for url in ("/", "/dashboard", "/web/js/api.js"):
        policy = (await client.get(url, headers=_BROWSER)).headers["content-security-policy"]
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert rules["default-src"] == "'none'" and "unsafe" not in policy and "http" not in policy
        assert [rules[f"{kind}-src"] for kind in ("script", "style", "connect", "img")] == ["'self'"] * 4


async def test_a_kept_file_is_not_sent_again(client: httpx.AsyncClient) -> None:
    first = await client.get("/web/js/api.js")
    assert first.headers["cache-control"] == "no-cache"
    again = await client.get("/web/js/api.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    other = await client.get("/web/js/chat.js", headers={"if-none-match": first.headers["etag"]})
    assert other.status_code == 200


@pytest.mark.parametrize(
    "path", ["nothing.js", "", "../http/app.py", "%2e%2e/http/app.py", "vendor/LICENSE-uplot.txt", "js"]
)
async def test_only_the_pages_files_are_served(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(f"/web/{path}")
    assert response.status_code == 404 and response.json()["error"]["code"] == "route_not_found"


async def test_with_a_key_the_pages_are_open_and_the_data_is_not(engine: FakeEngine) -> None:
    async with client_of(app_for(engine, http=HttpOptions(api_key="secret"))) as client:
        for url in ("/", "/dashboard", "/web/js/api.js", "/health", "/metrics"):
            response = await client.get(url, headers=_BROWSER)
            assert response.status_code == 200 and "tiny" not in response.text
        for url in ("/", "/comm", "/v1/models", "/docs", "/openapi.json", "/web"):
            assert (await client.get(url, headers={"accept": "application/json"})).status_code == 401


def test_vendored_files_are_those_of_their_packages() -> None:
    lines = (_WEB / "vendor" / "hashes.txt").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines if not line.startswith("#"))}
    present = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (_WEB / "vendor").iterdir()}
    present.pop("hashes.txt")
    assert listed == present
    assert {"LICENSE-htm.txt", "LICENSE-preact.txt", "LICENSE-uplot.txt"} <= listed.keys()


def test_own_files_insert_no_markup_and_load_nothing_from_elsewhere() -> None:
    own = {path: (_WEB / path).read_text() for path in web_files() if not path.startswith("vendor/")}
    for path, text in own.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), path
        addresses = set(re.findall(r"https?:/\S+", text)) - {'http://www.w3.org/2000/svg"'}
        assert not [address for address in addresses if re.match(r"https?://\w", address)], path
        assert text.count("\n") <= _MAX_LINES, path
    for page in ("index.html", "dashboard.html"):
        assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", own[page])
