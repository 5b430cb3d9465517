"""What the gateway and programs say to each other: JSON objects, version 1; unknown fields of a request are refused."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

import msgspec
import orjson

from streamrl.consumers.reward import RewardSample, Score
from streamrl.errors import DataError, StreamrlError

VERSION: Final = 1
MAX_COUNT: Final = 256
"""Samples in one answer, and leases or scores in one request."""
MAX_WAIT: Final = 60.0
MIN_LEASE, MAX_LEASE = 1.0, 600.0
MAX_PARTS: Final = 64
_MAX_WHY: Final = 1000
_MAX_DETAIL: Final = 16_384

_Ids = Annotated[list[Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(min_length=1, max_length=MAX_COUNT)]
_Names = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Parts = Annotated[dict[_Names, float], msgspec.Meta(max_length=MAX_PARTS)]


class Refusal(StreamrlError):
    """A request that is answered with an error; `status` is of HTTP, `code` a word for programs."""

    def __init__(self, status: int, code: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.status = status
        self.code = code


class ProgramFailed(StreamrlError, ValueError):
    """A program says that it could not score a sample. It says nothing of other samples, hence a `ValueError`."""


class LeaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/lease: `count` samples at most; waits up to `wait` s for the first; leases of `seconds` s."""

    version: int = VERSION
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)] = 1
    wait: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT)] = 20.0
    seconds: Annotated[float, msgspec.Meta(ge=MIN_LEASE, le=MAX_LEASE)] | None = None


class LeasesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/renew and /v1/release."""

    leases: _Ids
    version: int = VERSION


class Posted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The score of one sample (`value`, `parts`, `tokens`), or its failure (`error`, `detail`, `retry`)."""

    lease: Annotated[str, msgspec.Meta(max_length=64)]
    value: float | None = None
    parts: _Parts = {}
    tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    error: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    detail: str = ""
    retry: bool = True


class ScoresRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/scores."""

    scores: Annotated[list[Posted], msgspec.Meta(min_length=1, max_length=MAX_COUNT)]
    version: int = VERSION


_Request = TypeVar("_Request", LeaseRequest, LeasesRequest, ScoresRequest)


def parse(data: bytes, kind: type[_Request]) -> _Request:
    """Return the request in `data`; an empty body is an empty object.

    Raises:
        Refusal: no JSON (400); a field that is missing, unknown or out of range, or another version (422).
    """
    try:
        request = msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.ValidationError as error:
        inside = kind is ScoresRequest and "`$.scores[" in str(error)
        fields = ", ".join((Posted if inside else kind).__struct_fields__)
        raise Refusal(422, "invalid", str(error), f"fields: {fields}; see docs/guides/gateway.md") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refusal(400, "no_json", f"the body is no JSON: {error}", "send one JSON object") from error
    if request.version != VERSION:
        raise Refusal(422, "version", f"version {request.version} of the gateway is unknown", f"this one is {VERSION}")
    return request


def refuse_repeats(leases: list[str]) -> None:
    """See that no lease has two scores in one request; `Refusal`: one has; nobody knows which of them is meant."""
    places: dict[str, int] = {}
    for number, lease in enumerate(leases):
        first = places.setdefault(lease, number)
        if first != number:
            said = f"$.scores[{number}] has the lease of $.scores[{first}]"
            raise Refusal(422, "invalid", said, "post one score for each lease")


def end_of(posted: Posted, number: int) -> Score | ProgramFailed | DataError:
    """What a program says of a sample; a failure is an exception and never a number, `DataError` is not tried again.

    Raises:
        Refusal: neither or both of value and error, or a number that is not finite.
    """
    where = f"$.scores[{number}]"
    if (posted.value is None) == (posted.error is None):
        raise Refusal(422, "invalid", f"{where} needs either `value` or `error`", "a failure has no value")
    if posted.value is None:
        said = f"the program says: {str(posted.error)[:_MAX_WHY]}"
        failed = ProgramFailed(said) if posted.retry else DataError(said)
        if posted.detail:
            failed.add_note(posted.detail[-_MAX_DETAIL:])  # notes are shown with the traceback
        return failed
    try:
        return Score(posted.value, posted.parts, posted.tokens)
    except ValueError as error:
        raise Refusal(422, "invalid", f"{where}: {error}", "post `error` for a sample that cannot be scored") from error


def render(sample: RewardSample) -> bytes:
    """Return a sample as programs see it: the JSON that `streamrl reward test --sample` reads.

    Raises:
        TypeError: the answer or the metadata hold something that JSON does not know.
    """
    prompt = sample.prompt
    seen: dict[str, Any] = {
        "group": sample.group_id,
        "index": sample.index,
        "evaluation": prompt.evaluation,
        "line": prompt.line,
        "prompt": prompt.text,
        "messages": prompt.messages,
        "answer": prompt.answer,
        "metadata": prompt.metadata,
        "response": sample.text,
        "finish": sample.finish,
        "tokens": sample.tokens,
    }
    return orjson.dumps(seen, option=orjson.OPT_SERIALIZE_NUMPY)
