"""The reward `http`: a JSON server of yours scores samples, in any language (docs/guides/http-reward.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
from typing_extensions import override

from streamrl.consumers.reward import RewardContext, RewardLife, RewardSample, Score
from streamrl.errors import ConfigError, DataError, PluginError, RewardBusy, RewardUnavailable, WireError
from streamrl.http import BadAnswer, BadRequest, Call, HttpClient, Lost, read_key
from streamrl.images.encoded import data_url

_BUSY: Final = frozenset({429, 503})
_NOT_HERE: Final = frozenset({404, 405, 409})  # says nothing of the samples: a proxy answers it while the server starts
_WRONG_KEY: Final = frozenset({401, 403})
_OPEN_SECONDS: Final = 10.0
_SHARE: Final = 0.95
"""Part of the deadline after which a request gives up by itself, with an error that names the server."""
_FAIR_SHARE: Final = 0.5  # of its time; a sample with less of it left is not sent
_Waiting = tuple[RewardSample, asyncio.Future[Score], float]  # the last one: its end by `time.monotonic`


class _Found(msgspec.Struct):
    score: float | None = None
    parts: dict[str, float] = {}
    tokens: int = 0
    detail: str = ""
    error: str = ""


class _Several(msgspec.Struct):
    scores: list[float | _Found]


class HttpReward(RewardLife):
    """Posts samples as JSON to a server and reads scores from its answers.

    Args:
        url: where to post, for example `http://127.0.0.1:8900/score`.
        send: `sample`: a request has one sample. `batch`: it has the samples that wait, as a list. `group`: it has all
            samples of a group, as a list, so the server may compare them.
        batch: most samples of a request with `send: batch`. One worker sends one such request at a time.
        api_key_file: file with a key, which is sent as a bearer token.
        images: what stands in `images` for those that the policy saw: their SHA-256 (`hash`), or `data:` URLs (`data`).

    Raises:
        PluginError: an argument is wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        send: Literal["sample", "batch", "group"] = "sample",
        batch: int = 64,
        api_key_file: str | None = None,
        images: Literal["hash", "data"] = "hash",
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
            raise PluginError(f"url {url!r} is no address", "write http://HOST:PORT/PATH; a key is in api_key_file")
        if send not in {"sample", "batch", "group"}:
            raise PluginError(f"send is {send!r}", "it is one of sample, batch, group")
        if images not in {"hash", "data"}:
            raise PluginError(f"images is {images!r}", "it is hash or data")
        if type(batch) is not int or batch < 1:
            raise PluginError(f"batch is {batch!r}", "it is a whole number from 1 on")
        self._server = f"{parts.scheme}://{parts.netloc}"
        self._path = url.removeprefix(self._server) or "/"
        self._send, self._batch, self._key_file = send, batch, api_key_file
        self._shows = images == "data"
        self._waiting: list[_Waiting] = []
        self._sending: asyncio.Task[None] | None = None
        self._client: HttpClient | None = None
        self.score_group = self._scores if send == "group" else None

    @override
    def slots(self) -> int | None:
        return 2 * self._batch if self._send == "batch" else None  # one batch is scored, and one waits

    @override
    async def open(self, context: RewardContext) -> None:
        self._limit = _SHARE * context.deadline
        file = None if self._key_file is None else Path(self._key_file)
        key = await asyncio.to_thread(read_key, "args.api_key_file", file)
        hint = "start the server of args.url; docs/guides/http-reward.md has one"
        self._client = HttpClient(self._server, key, hint, key_option="args.api_key_file")
        try:
            await self._client.call(Call("GET", self._path), _OPEN_SECONDS, retry=False)
        except (BadAnswer, BadRequest, WireError) as error:  # a route for posts alone answers 404 or 405, say
            if isinstance(error, BadAnswer) and error.status in _WRONG_KEY:
                raise ConfigError(error.message, "set args.api_key_file to the key of the server") from error

    @override
    async def close(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
        if self._client is not None:
            await self._client.close()

    async def score(self, sample: RewardSample) -> Score:
        if self._send == "sample":
            (score,) = await self._scores([sample])
            return score
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, future, time.monotonic() + self._limit))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_batches(), name="http reward")
        return await future

    async def _send_batches(self) -> None:
        """Send what waits, one request after the other, until nothing waits."""
        while self._waiting:
            batch = self._waiting[: self._batch]
            del self._waiting[: self._batch]
            request = asyncio.create_task(self._send_batch(batch), name="http reward batch")
            try:
                await asyncio.wait([future for _, future, _ in batch])  # until all have a result, or nobody wants one
            finally:
                request.cancel()

    async def _send_batch(self, batch: Sequence[_Waiting]) -> None:
        """Send samples and hand out what comes. The halves of a request that is refused are sent alone."""
        late = time.monotonic() + _FAIR_SHARE * self._limit
        for _, future, until in batch:
            if until < late and not future.done():
                future.set_exception(RewardBusy(f"{self._server}{self._path} took too long for those before"))
        fair = [one for one in batch if not one[1].done()]
        if not fair:
            return
        try:
            found = await self._post([sample for sample, _, _ in fair], min(until for _, _, until in fair))
        except (BadRequest, DataError) as error:  # DataError: an image of one of them is missing
            if half := len(fair) // 2:
                await self._send_batch(fair[:half])
                await self._send_batch(fair[half:])
                return
            found = [error]
        except Exception as error:  # noqa: BLE001 (handed to those who wait)
            found = [error] * len(fair)
        for (_, future, _), one in zip(fair, found, strict=True):
            if future.done():
                continue
            if isinstance(one, Score):
                future.set_result(one)
            else:
                future.set_exception(one)

    async def _scores(self, samples: Sequence[RewardSample]) -> list[Score]:
        scores = []
        for one in await self._post(samples, time.monotonic() + self._limit):
            if not isinstance(one, Score):
                raise one
            scores.append(one)
        return scores

    async def _post(self, samples: Sequence[RewardSample], until: float) -> list[Score | Exception]:
        """A score or an error for each sample. Raises what failed the request as a whole."""
        bodies = [_body(sample) | await self._images(sample) for sample in samples]
        single = self._send == "sample"
        answer = await self._answer(bodies[0] if single else {"samples": bodies}, until)
        try:
            if single:
                found = [msgspec.convert(answer, float | _Found)]
            else:
                found = msgspec.convert(answer if isinstance(answer, dict) else {"scores": answer}, _Several).scores
        except msgspec.ValidationError as error:
            wanted = '{"score": 1.0}' if single else '{"scores": [1.0, ...]}'
            raise WireError(f"{self._server}{self._path} answered {str(answer)[:100]!r}: {error}", wanted) from error
        if len(found) != len(samples):
            raise WireError(f"{self._server}{self._path} answered {len(found)} scores for {len(samples)} samples")
        return [_score(one) for one in found]

    async def _images(self, sample: RewardSample) -> dict[str, list[str]]:
        if not self._shows or not sample.images:
            return {"images": [image.sha256 for image in sample.images]} if sample.images else {}
        return {"images": await asyncio.to_thread(lambda: [data_url(image.data) for image in sample.images])}

    async def _answer(self, body: dict[str, Any], until: float, *, pooled: bool = True) -> Any:
        """What the server answers. Asked again if a pooled connection broke, since the server may have closed it."""
        assert self._client is not None, "scores come after open"
        call, seconds = Call("POST", self._path, body, pooled=pooled), round(max(0.0, until - time.monotonic()), 2)
        try:
            return await self._client.call(call, seconds, retry=False)
        except Lost as error:
            if not error.sent:
                raise RewardUnavailable(error.message, error.hint) from error
            if error.late or not pooled:
                raise
        except (BadAnswer, BadRequest) as error:
            if error.status in _BUSY:
                raise RewardBusy(error.message, error.hint) from error
            if error.status in _NOT_HERE:
                raise BadAnswer(error.message, error.hint, error.status) from error
            raise
        return await self._answer(body, until, pooled=False)


def _score(found: float | _Found) -> Score | Exception:
    if isinstance(found, float):
        found = _Found(found)
    if found.error or found.score is None:
        return RuntimeError(found.error or "the server answered neither `score` nor `error`")
    try:
        return Score(found.score, found.parts, found.tokens, found.detail)
    except (TypeError, ValueError) as error:
        return error


def _body(sample: RewardSample) -> dict[str, Any]:
    """The sample as `streamrl reward test --sample` reads it."""
    prompt = sample.prompt
    return {
        "group": sample.group_id,
        "index": sample.index,
        "line": prompt.line,
        "evaluation": prompt.evaluation,
        "prompt": prompt.text,
        "messages": sample.messages,
        "answer": prompt.answer,
        "metadata": prompt.metadata,
        "response": sample.text,
        "completion": sample.completion,
        "finish": sample.finish,
        "tokens": sample.tokens.tolist(),
    }
