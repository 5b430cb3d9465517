"""URLs of a Redis server: how they are shown, and how they are written."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

URL_HINT: Final = (
    "write redis://HOST:PORT/DB, rediss://... or unix:///PATH; special characters of a password are written as %XX, "
    "or better: redis.password_file"
)


def redact(url: str) -> str:
    """The URL without passwords and options, for logs and messages; never raises, and of a broken URL shows little."""
    scheme, there, _ = url.partition("://")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return f"{scheme}://***"
    credentials, at, place = parts.netloc.rpartition("@")
    # A password with a bare / ? or # ends the host early, and its rest looks like a path.
    if not there or (scheme != "unix" and not at and "@" in url):
        return f"{scheme}://***" if there else "***"
    user, colon, _ = credentials.partition(":")
    hidden = f"{user}:***@" if colon else "***@"
    return f"{scheme}://{hidden if at else ''}{place}{parts.path}{'?***' if parts.query else ''}"
