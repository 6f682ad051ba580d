"""The page at `/`: a prompt, its tokens as they arrive, what the pipeline does meanwhile.

Plain files without a build step, served as they are. All that the page loads comes from this server, and its
Content-Security-Policy allows nothing else.
"""

from importlib.resources import files
from pathlib import PurePath

from fastapi import FastAPI, HTTPException, Response

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def mount(app: FastAPI) -> None:
    """Adds the page at `/` and its parts below `/page/`; neither needs an API key."""
    parts = {
        file.name: file.read_bytes()
        for file in files(__package__).iterdir()
        if PurePath(file.name).suffix in MEDIA_TYPES
    }

    async def part(name: str) -> Response:
        if name not in parts:
            raise HTTPException(404, f"the page has no part {name!r}")
        return Response(parts[name], media_type=MEDIA_TYPES[PurePath(name).suffix], headers=HEADERS)

    async def page() -> Response:
        return await part("index.html")

    app.add_api_route("/", page, include_in_schema=False)
    app.add_api_route("/page/{name}", part, include_in_schema=False)
