"""What `NativeDialect` sends to `streamrl engines serve`: JSON bodies, checked before anything is done with them.

```
GET  /about /ready /health                what it is; whether it takes requests; whether it decodes
GET  /figures ?owner                      how busy it is; renews the owner's pause
POST /generate                            server-sent events: {tokens, logprobs}, the last one with {finish, runs}
POST /abort {id}                          end one request, or all
POST /pause {owner, seconds}              stand still until `resume` of all owners, or until a lease runs out
POST /resume {owner}
POST /weights/prefetch, /weights/update   bring a version near; put it in force
POST /sleep {level}, /wake {tags}
```
An error is {"error": {"kind", "message", "hint"}}, as an answer or as the last event of a stream.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from streamrl.engine import MemoryTag
from streamrl.weight_sync.manifest import Adapter

ErrorKind: TypeAlias = Literal["data", "weights", "refused", "request", "forbidden", "dead", "internal"]

_Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Token: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=86400)]
_File: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
_Url: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s]{1,500}$")]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base: unknown fields are refused."""


class Generate(_Message, frozen=True):
    """One response to be sampled; see `engine.Request`. `interval`: tokens between two events of the stream."""

    id: _Name
    tokens: list[_Token]
    max_new_tokens: int
    temperature: float = 1.0
    affinity: str = ""
    cache_version: _Count | None = None
    interval: Annotated[int, msgspec.Meta(ge=1)] = 1


class Abort(_Message, frozen=True):
    """End one request; all without an id."""

    id: _Name | None = None


class Pause(_Message, frozen=True):
    """Stand still. Silence of the owner for `seconds` counts as its `resume`."""

    owner: _Name
    seconds: _Seconds


class Resume(_Message, frozen=True):
    owner: _Name


class Weights(_Message, frozen=True):
    """One version; see `Version`.

    A server on the sender's own host reads the files of `folder`. Another one pulls the version from `sources`, or
    without any reads `folder` as a shared file system.
    """

    run: _Name
    pair: tuple[_Count, _Count]
    step: _Count
    folder: str
    files: list[_File]
    parts: dict[str, list[_File]]
    sources: list[_Url] = []
    deltas: bool = False
    adapter: Adapter | None = None

    def __post_init__(self) -> None:
        if not Path(self.folder).is_absolute():
            raise ValueError("the folder must be an absolute path")
        listed = set(self.files)
        if any(not files or not listed.issuperset(files) for files in self.parts.values()):
            raise ValueError("a tensor lies in a file that is not listed")


class Sleep(_Message, frozen=True):
    level: Literal[0, 1]


class Wake(_Message, frozen=True):
    tags: list[MemoryTag]
