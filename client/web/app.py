"""The addresses of the page: its files, ``/api/...`` as JSON, and the live views as server-sent events.

docs/web.md lists the addresses. A visitor without a session gets only the files, ``/api/session`` and the login.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from probing.api.errors import InternalError, NotFound, Overloaded, ProbingError, Unauthenticated, UsageError
from probing.client.diagnosis.html import POLICY
from probing.client.session import warn
from probing.client.version import program
from probing.client.web import downloads
from probing.client.web.answers import encoded, error_body, status_of
from probing.client.web.downloads import FileAnswer, Files
from probing.client.web.guard import App, Guard, Rate
from probing.client.web.jobs import finding_file
from probing.client.web.panels import Panel, Panels, answer, ask
from probing.client.web.parameters import Parameters
from probing.client.web.streams import EventStream, Placed, left
from probing.client.web.visitors import Sessions, Visitor

__all__ = ("Site", "application")

STATIC = Path(__file__).parent / "static"
_JSON = "application/json"
# The addresses of screens. All of them get the same page, whose script shows the screen of the address.
_SCREENS = ("/", "/jobs", "/job/{rest:path}", "/groups", "/groups/{rest:path}", "/workers", "/sql", "/nodes")
_NOT_BUILT = (
    "<!doctype html><title>probingd</title><p>The page is not part of this installation: <code>make web</code>."
)
_REFUSED_S = 1.0
# The names that esbuild gives to files, with a hash of the content: page-NVQCTN5P.css.
_HASHED = re.compile(r"-[0-9A-Z]{8}\.\w+$")
# The maximum number of files that are written at the same time, for all visitors together. It bounds the memory,
# because a timeline takes some hundred MB.
_MOST_FILES = 4


@dataclass(frozen=True, slots=True)
class Site:
    """The target, nodes and user that the page shows, its host names, and the name of its cookie.

    ``secure``: the page is served over TLS, and its cookie is sent only over TLS. ``signs``: the server may sign
    changes of groups, and commands to groups, with the key of its user.
    """

    target: str
    all_nodes: bool
    user: str
    names: tuple[str, ...]
    cookie: str
    secure: bool
    signs: bool = False


def application(site: Site, sessions: Sessions, panels: Panels, posted: Panels) -> App:
    """Returns the ASGI application that serves ``panels`` to the visitors of ``sessions``.

    ``posted``: the panels whose parameters are the body of a POST.
    """
    return Guard(_Pages(site, sessions, panels, posted).starlette(), site.names)


class _Pages:
    def __init__(self, site: Site, sessions: Sessions, panels: Panels, posted: Panels) -> None:
        self._site = site
        self._sessions = sessions
        self._panels = panels
        self._posted = posted
        self._writing = CapacityLimiter(_MOST_FILES)
        # Limits the attempts to log in with a key or a token, by address or user.
        self._attempts = Rate(burst=5, a_second=0.1)

    def starlette(self) -> Starlette:
        routes: list[Route | Mount] = [
            *(Route(path, self._screen, methods=["GET"]) for path in _SCREENS),
            Route("/api/session", self._session, methods=["GET"]),
            Route("/api/login", self._login, methods=["POST"]),
            Route("/api/logout", self._logout, methods=["POST"]),
            Route("/api/live/jobs", self._live, methods=["GET"]),
            Route("/api/live/job", self._live, methods=["GET"]),
            Route("/api/finding.html", self._finding, methods=["GET"]),
            Route("/api/query/download", partial(self._file, downloads.rows), methods=["POST"]),
            Route("/api/timeline", partial(self._file, downloads.columns), methods=["GET"]),
            Route("/api/timeline/download", partial(self._file, downloads.trace), methods=["GET"]),
            *(
                Route(f"/api/{name}", partial(self._panel, panel), methods=["GET"])
                for name, panel in self._panels.items()
            ),
            *(
                Route(f"/api/{name}", partial(self._post, panel), methods=["POST"])
                for name, panel in self._posted.items()
            ),
        ]
        if STATIC.is_dir():
            routes.append(Mount("/static", _Files(directory=STATIC)))
        errors: dict[Any, Any] = {ProbingError: _refused, HTTPException: _no_such_page, Exception: _broken}
        # Compression saves time on a network, but not on loopback.
        smaller = [Middleware(GZipMiddleware, minimum_size=1 << 12, compresslevel=4)] if self._site.secure else []
        return Starlette(routes=routes, exception_handlers=errors, middleware=smaller)

    async def _screen(self, request: Request) -> Response:
        """Returns the page. ``/?key=`` begins a session if the key is right, and redirects to a URL without the key."""
        key = parse_qs(request.url.query).get("key") if request.url.path == "/" else None
        if key:
            cookie = await self._begun(request, key[0])
            answered: Response = RedirectResponse("/jobs", status_code=303)
            self._set(answered, cookie)
            return answered
        index = STATIC / "index.html"
        headers = {"cache-control": "no-cache"}
        return FileResponse(index, headers=headers) if index.is_file() else HTMLResponse(_NOT_BUILT, headers=headers)

    async def _session(self, request: Request) -> Response:
        try:
            self._visitor(request)
        except Unauthenticated:
            said: dict[str, object] = dict.fromkeys(("target", "all_nodes", "user", "version", "can"))
            login: str | None = self._sessions.door.login
        else:
            site = self._site
            said = {
                "target": site.target,
                "all_nodes": site.all_nodes,
                "user": site.user or None,
                "version": program(),
                "can": ["groups"] if site.signs else [],
            }
            login = None
        return JSONResponse({**said, "languages": ["en", "zh"], "login_needed": login is not None, "login": login})

    async def _login(self, request: Request) -> Response:
        token = Parameters.of_json(await _object(request)).text("token")
        answered = JSONResponse({})
        self._set(answered, await self._begun(request, token))
        return answered

    async def _begun(self, request: Request, secret: str) -> str:
        """Returns the cookie of a new session. Raises Overloaded after too many attempts."""
        if not self._attempts.take(request.scope["state"]["peer"].name):
            raise Overloaded("too many attempts to log in", hint="try again in ten seconds")
        try:
            return await self._sessions.begin(secret)
        except Unauthenticated:
            await asyncio.sleep(_REFUSED_S)
            raise

    async def _logout(self, request: Request) -> Response:
        self._sessions.end(request.cookies.get(self._site.cookie))
        answered = JSONResponse({})
        answered.delete_cookie(self._site.cookie, secure=self._site.secure, httponly=True, samesite="strict")
        return answered

    async def _live(self, request: Request) -> Placed:
        visitor = self._visitor(request)
        job = None
        if request.url.path.endswith("/job"):
            job = Parameters(request.query_params).text("job")
        cookie = request.cookies[self._site.cookie]
        return Placed(visitor, EventStream(visitor.live, job, lambda: self._sessions.use(cookie)))

    async def _panel(self, panel: Panel, request: Request) -> Response:
        return await self._answered(request, self._visitor(request), panel, Parameters(request.query_params))

    async def _finding(self, request: Request) -> Response:
        visitor, parameters = self._visitor(request), Parameters(request.query_params)
        work = partial(ask, visitor.question(parameters), finding_file)
        page = await visitor.work(work, left(request.receive))
        policy = {"content-security-policy": f"{POLICY}; frame-ancestors 'none'"}
        return HTMLResponse(page, headers={**policy, "content-disposition": 'inline; filename="finding.html"'})

    async def _file(self, files: Files, request: Request) -> Placed:
        visitor = self._visitor(request)
        posted = request.method == "POST"
        parameters = Parameters.of_json(await _object(request)) if posted else Parameters(request.query_params)
        return Placed(visitor, FileAnswer(*files(visitor.question(parameters)), (visitor.files, self._writing)))

    async def _post(self, panel: Panel, request: Request) -> Response:
        visitor = self._visitor(request)
        return await self._answered(request, visitor, panel, Parameters.of_json(await _object(request)))

    async def _answered(self, request: Request, visitor: Visitor, panel: Panel, parameters: Parameters) -> Response:
        work = partial(answer, visitor.question(parameters), panel, visitor.lost_rows)
        body = await visitor.work(work, left(request.receive))
        return Response(body, media_type=_JSON)

    def _visitor(self, request: Request) -> Visitor:
        return self._sessions.visitor(request.cookies.get(self._site.cookie))

    def _set(self, answered: Response, cookie: str) -> None:
        answered.set_cookie(self._site.cookie, cookie, secure=self._site.secure, httponly=True, samesite="strict")


class _Files(StaticFiles):
    """Serves files; browsers may keep files whose names have a hash of the content."""

    def file_response(self, full_path: Any, *arguments: Any, **named: Any) -> Response:
        answered = super().file_response(full_path, *arguments, **named)
        kept = _HASHED.search(str(full_path)) is not None
        answered.headers["cache-control"] = "public, max-age=31536000, immutable" if kept else "no-cache"
        return answered


async def _object(request: Request) -> Mapping[str, object]:
    """Returns the body of a POST. Raises UsageError if the body is not a JSON object."""
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise UsageError("the body is not a JSON object", hint='for example {"sql": "SELECT 1"}')
    return body


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ProbingError)
    return Response(encoded(error_body(error)), status_of(error), media_type=_JSON)


async def _no_such_page(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = NotFound if error.status_code == 404 else UsageError
    message = "there is no such address here" if error.status_code == 404 else error.detail
    said = kind(message, hint="docs/web.md lists the addresses")
    return Response(encoded(error_body(said)), error.status_code, media_type=_JSON)


async def _broken(request: Request, error: Exception) -> Response:
    said = InternalError(f"{type(error).__name__}: {error}")
    warn(f"{request.url.path}: {said.message}")
    return Response(encoded(error_body(said)), 500, media_type=_JSON)
