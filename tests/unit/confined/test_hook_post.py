"""The webhook: whatever a server does, the reason is named, without the URL."""

from __future__ import annotations

import urllib.request
from http.client import BadStatusLine
from urllib.error import HTTPError, URLError

import pytest

from probing.daemon.confined import hook

URL = "https://host/secret"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (HTTPError(URL, 503, "no", None, None), "the webhook answered 503"),  # type: ignore[arg-type]
        (TimeoutError(), "the webhook did not answer within 3 s"),
        (URLError(TimeoutError()), "the webhook did not answer within 3 s"),
        (URLError(ConnectionRefusedError(111, URL)), "the webhook cannot be reached: ConnectionRefusedError"),
        (BadStatusLine(URL), "the webhook cannot be reached: BadStatusLine"),
        (ValueError(URL), "the webhook cannot be reached: ValueError"),
    ],
)
def test_a_post_that_fails_is_named(error: Exception, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", fails)
    assert hook._post(URL, b"{}", 3.0) == [text]
