"""GET /dashboard and /web/...: the playground and the dashboard, as static files that are read once at the start."""

import hashlib
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from tightwire import server

# The pages load only their own files, run no inline script and insert no markup. `trusted-types` makes the browser
# refuse innerHTML too.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
# Licences and hashes of server/web/vendor are not served.
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "cache-control": "no-cache",  # a browser keeps a file, and asks with its ETag whether it has changed
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@cache
def web_files() -> dict[str, tuple[bytes, str, str]]:
    """Content, media type and ETag of the files that are served, by their path under server/web."""
    root, found = Path(server.__path__[0]) / "web", dict[str, tuple[bytes, str, str]]()
    for path in root.rglob("*"):
        if media_type := _TYPES.get(path.suffix):
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.relative_to(root).as_posix()] = content, media_type, etag
    return found


def file_response(request: Request, path: str) -> Response:
    """A file of server/web; 304 if the browser has this version. HTTPException 404: there is no such file."""
    if path not in web_files():
        raise HTTPException(404)
    content, media_type, etag = web_files()[path]
    headers = {"etag": etag, **_HEADERS}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=media_type)


def pages_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/dashboard")
    async def dashboard(request: Request) -> Response:
        return file_response(request, "dashboard.html")

    @router.get("/web/{path:path}")
    async def web_file(request: Request, path: str) -> Response:
        return file_response(request, path)

    return router
