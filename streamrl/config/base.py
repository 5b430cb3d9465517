"""Types of configuration values and the base of all sections."""

from __future__ import annotations

import ipaddress
import math
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args
from urllib.parse import urlparse

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

ServerKind: TypeAlias = Literal["vllm", "sglang"]
"""Servers that streamrl installs, starts and checks."""
SERVER_KINDS: Final[tuple[ServerKind, ...]] = get_args(ServerKind)

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _size(value: Any) -> Any:
    """Accept `512MiB` next to a plain number of bytes."""
    if not isinstance(value, str):
        return value
    digits = value.strip().rstrip("bBkKmMgGiI ")
    unit = value.strip()[len(digits) :].strip().lower()
    number = _finite(digits)
    if unit not in _UNITS or number is None:
        raise ValueError(f"{value!r} is not a size (write 512MiB, 8GiB or a number of bytes)")
    return int(number * _UNITS[unit])


def _duration(value: Any) -> Any:
    """Accept `10m` next to a plain number of seconds."""
    if not isinstance(value, str):
        return value
    digits = value.strip().rstrip("mshd ")
    unit = value.strip()[len(digits) :].strip() or "s"
    number = _finite(digits)
    if unit not in _SECONDS or number is None:
        raise ValueError(f"{value!r} is not a duration (write 500ms, 30s, 10m or a number of seconds)")
    return number * _SECONDS[unit]


def _finite(digits: str) -> float | None:
    """The number that a text says; None for anything else, infinity included."""
    try:
        number = float(digits)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _server_url(value: str) -> str:
    """Return the URL of a server as its name: without a slash at the end, and without a secret."""
    parts = urlparse(value)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{value!r} is not the URL of a server (write http://HOST:PORT)")
    if parts.username or parts.password:
        raise ValueError("a URL with a password is shown to everybody: put the key into engine.api_key_file")
    return value.rstrip("/")


def is_loopback(host: str) -> bool:
    """Whether only this host reaches a server that listens on `host`; names other than localhost are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


_MOST: Final = (1 << 63) - 1


def _store_url(value: str) -> str:
    if "://" not in value and not value.startswith("/"):
        raise ValueError("write an absolute path or a URL")
    if urlparse(value).password:
        raise ValueError("a URL with a password is shown to everybody: put it where fsspec looks for it")
    return value


Size = Annotated[int, BeforeValidator(_size), Field(gt=0, le=_MOST)]
Duration = Annotated[float, BeforeValidator(_duration), Field(gt=0)]
Positive = Annotated[int, Field(ge=1, le=_MOST)]
Natural = Annotated[int, Field(ge=0, le=_MOST)]
Fraction = Annotated[float, Field(ge=0, le=1)]
ServerUrl = Annotated[str, AfterValidator(_server_url)]
StoreUrl = Annotated[str, AfterValidator(_store_url)]

MODEL: Final = "directory or hub name"
"""Marks the name of a model in an annotation: a path if something exists there. A `Path` always is a path."""


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
