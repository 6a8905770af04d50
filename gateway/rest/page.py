"""Pages, each one file of `gateway/page/`, which need nothing from elsewhere and load nothing else: the one at `/`."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

PATH, DOCS_PATH = "/", "/docs"
_FOLDER = Path(__file__).resolve().parents[1] / "page"
FILE, DOCS_FILE = _FOLDER / "index.html", _FOLDER / "docs.html"


def page_route(path: str = PATH, file: Path = FILE) -> Route:
    """Shows a page to everybody: it holds nothing of anybody's, and asks for a key where the API wants one."""
    text = file.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy_of(text),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }

    async def show(request: Request) -> Response:
        return HTMLResponse(text, headers=headers)

    return Route(path, show)


def policy_of(text: str) -> str:
    """Return the page's content security policy: its own script and style, by their hashes, and its own server."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(text, 'script')}",
            f"style-src {_hash(text, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _hash(text: str, tag: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
