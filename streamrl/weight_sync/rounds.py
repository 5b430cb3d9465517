"""What the learner's host and the members of a broadcast say to each other, as JSON over one WebSocket each.

```
member -> host   hello
host   -> member done (the version announced last, if any)
then for each round of a version:
host   -> member offer (manifest)          member -> host  ready (room was taken)
host   -> member go (group, rank, size)    the bytes travel in the group
host   -> member abandon (when it failed)  member -> host  got (whole or not, bytes received)
host   -> member done                      who has not got it by now pulls it
```
The open WebSocket is the membership: a member whose process dies is out of it at once.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from streamrl.errors import WireError
from streamrl.weight_sync.manifest import MAX_MANIFEST_BYTES, Pair

PATH: Final = "/members"
MAX_MESSAGE_BYTES: Final = 2 * MAX_MANIFEST_BYTES
_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A member introduces itself; `device` is the UUID of a CUDA device that it has in use, empty when none."""

    name: _Text
    device: _Text = ""


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """A version is about to be sent; `manifest` is its encoded manifest."""

    number: _Number
    manifest: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Whether the member has room for the offered version and wants it."""

    number: _Number
    ok: bool


class Go(msgspec.Struct, frozen=True, tag="go"):
    """Join the group `group` with this rank and take what rank 0 sends.

    `stall` is how many seconds one piece may take.
    """

    number: _Number
    group: _Text
    rank: Annotated[int, msgspec.Meta(ge=1)]
    size: Annotated[int, msgspec.Meta(ge=2)]
    host: _Text
    port: _Number
    backend: Literal["gloo", "nccl"]
    stall: Annotated[float, msgspec.Meta(gt=0)]


class Got(msgspec.Struct, frozen=True, tag="got"):
    """How the round ended for the member: `whole` means received and proven."""

    number: _Number
    whole: bool
    bytes: _Number


class Abandon(msgspec.Struct, frozen=True, tag="abandon"):
    """The round failed: do not wait for more of it."""

    number: _Number


class Done(msgspec.Struct, frozen=True, tag="done"):
    """No more rounds of this version or those before it."""

    pair: Pair


ToHost: TypeAlias = Hello | Ready | Got
ToMember: TypeAlias = Offer | Go | Abandon | Done
_to_host: msgspec.json.Decoder[ToHost] = msgspec.json.Decoder(ToHost)
_to_member: msgspec.json.Decoder[ToMember] = msgspec.json.Decoder(ToMember)


def pack(message: ToHost | ToMember) -> str:
    """Return a message as text."""
    return msgspec.json.encode(message).decode()


def unpack_from_member(text: str) -> ToHost:
    """Return what a member said; `WireError` when it is no message."""
    try:
        return _to_host.decode(text)
    except msgspec.DecodeError as error:
        raise WireError(f"not a message of a member: {error}") from error


def unpack_from_host(text: str) -> ToMember:
    """Return what the learner's host said; `WireError` when it is no message."""
    try:
        return _to_member.decode(text)
    except msgspec.DecodeError as error:
        raise WireError(f"not a message of the learner's host: {error}") from error
