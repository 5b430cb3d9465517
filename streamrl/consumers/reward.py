"""The contract of a reward plug-in: a class, or a plain function, that gives one response a number.

```python
from streamrl.consumers import GroupReward, Reward, Score

class ExactMatch(Reward):
    async def score(self, sample) -> Score:
        return Score(float(sample.text.strip() == sample.prompt.answer))

class Shortest(GroupReward):             # compares the responses to one prompt
    async def score_group(self, samples):
        least = min(len(sample.tokens) for sample in samples)
        return [float(len(sample.tokens) == least) for sample in samples]

def short(sample) -> float:              # a plain function will do as well, sync or async
    return 1.0 if len(sample.tokens) < 100 else 0.0
```

A reward may be called again for a sample it has already scored (a retry, or a worker that died before the score was
written), so it must not matter how often it is called. An `async` reward shares the event loop with all samples in
flight and must await what takes long; a sync one runs in a thread of its own, so it must be thread-safe. The first
score that reaches Redis counts.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from typing_extensions import deprecated

from streamrl.config import ImagesConfig, RewardModelConfig, RunConfig
from streamrl.errors import ConfigError, RewardUnavailable
from streamrl.images.store import ImageStore
from streamrl.score import Score as Score  # noqa: PLC0414 (users import it from here)
from streamrl.score import finite as finite  # noqa: PLC0414
from streamrl.wire import Int32Array, Prompt, Sample, SampleScore, StopReason, Turn

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class RewardPrompt:
    """The prompt of a response: `text` and `messages` as in the data set, with its `answer` and `metadata`.

    `tokens` are the ids the engine was given, shape (prompt tokens,). `line` is the line of the data set, from 0.
    `images` are in the order in which it shows them; its messages have `{"type": "image", "sha256": ...}` for each.
    """

    text: str
    messages: list[dict[str, Any]] | None
    answer: Any
    metadata: dict[str, Any]
    tokens: Int32Array
    line: int
    evaluation: bool
    images: tuple[RewardImage, ...] = ()


@dataclass(frozen=True, slots=True)
class RewardImage:
    """An image that the policy saw, named by the SHA-256 of its encoded bytes, in hexadecimal."""

    sha256: str
    load: Callable[[], bytes] = field(repr=False, compare=False)

    @property
    def data(self) -> bytes:
        """A PNG, JPEG or WebP of one frame in 8-bit RGB. A large one is read now: `DataError` if it is gone."""
        return self.load()


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One response to score, or one episode.

    `text` is the response without special tokens; of an episode, its last turn alone. `messages` are the whole
    conversation that ends with it, and `completion` its part from the first reply on, with roles, calls of tools and
    their results. `turns` are what an episode recorded, with the turns of other branches; a single answer has none.

    `tokens` are the sampled ids of all turns with the end-of-sequence tokens, shape (completion tokens,), and `finish`
    says how the last one ended: `stop` (end of sequence), `length` (limit) or `abort`. `score` is what an episode gave
    itself, `stop` why it ended; both None for single answers.
    `group_id` is the id of its group and `index` its number in it, from 0: together they name it in `streamrl trace`,
    in dead letters and in logs. Both are 0 where there is no run. Held-out groups have ids of their own
    (`prompt.evaluation`). `images` are those of the prompt and then those that tools, environments and agents showed.
    """

    text: str
    prompt: RewardPrompt
    tokens: Int32Array
    finish: Literal["stop", "length", "abort"]
    group_id: int = 0
    index: int = 0
    score: SampleScore | None = None
    stop: StopReason | None = None
    turns: Sequence[Turn] = ()
    completion: list[dict[str, Any]] = field(default_factory=list)
    images: tuple[RewardImage, ...] = ()
    messages: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        opening, completion = _said(self)
        object.__setattr__(self, "completion", completion)
        object.__setattr__(self, "messages", [*opening, *completion])

    @property
    @deprecated("use `group_id`")
    def gid(self) -> int:
        """The former name of `group_id`."""
        return self.group_id

    @classmethod
    def of(
        cls, prompt: Prompt, sample: Sample, group_id: int = 0, index: int = 0, store: ImageStore | None = None
    ) -> RewardSample:
        """Build a sample from the messages of the wire, without copies; `store` has the large ones of its images."""
        shown = _images(prompt.images, prompt.blobs, store)
        seen = RewardPrompt(
            text=prompt.text,
            messages=prompt.messages,
            answer=prompt.answer,
            metadata=prompt.metadata,
            tokens=prompt.token_ids,
            line=prompt.line,
            evaluation=prompt.evaluation,
            images=shown,
        )
        return cls(
            text=sample.text,
            prompt=seen,
            tokens=sample.token_ids,
            finish=sample.finish,
            group_id=group_id,
            index=index,
            score=sample.score,
            stop=sample.stop,
            turns=sample.turns,
            images=shown + _images(sample.images, [*prompt.blobs, *sample.blobs], store),
        )


def _images(names: Sequence[str], travelled: Sequence[bytes], store: ImageStore | None) -> tuple[RewardImage, ...]:
    def load(name: str) -> bytes:
        try:
            return (store or ImageStore(ImagesConfig())).read([name], travelled)[name]
        except OSError as error:
            raise RewardUnavailable(f"an image cannot be read: {error}") from error

    return tuple(RewardImage(name, partial(load, name)) for name in names)


def branch(turns: Sequence[Turn]) -> list[Turn]:
    """The turns of the branch that ends with the last sampled one, the first turn first."""
    at = max((at for at, turn in enumerate(turns) if turn.sampled), default=-1)
    found = []
    while at >= 0:
        found.append(turns[at])
        at = turns[at].parent
    return found[::-1]


def _said(sample: RewardSample) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages before the first reply, and all from it on. A text prompt is one message of the user."""
    opening = list(sample.prompt.messages or [{"role": "user", "content": sample.prompt.text}])
    turns = branch(sample.turns)
    replies = [turn.messages for turn in turns if turn.messages]
    if not replies:
        given = sample.completion  # one plain message is the text, also after `dataclasses.replace`
        is_more = bool(given) and (len(given) > 1 or bool(given[0].keys() - {"role", "content"}))
        return opening, list(given) if is_more else [{"role": "assistant", "content": sample.text}]
    if not turns[0].sampled:
        opening = replies[0][:-1]
    return opening, [replies[0][-1], *(message for said in replies[1:] for message in said)]


class AskedModel(Protocol):
    """One entry of `reward_models` as a reward asks it. Hides the servers behind it, their health and their limits."""

    @property
    def config(self) -> RewardModelConfig:
        """Its entry in the run file."""

    @property
    def slots(self) -> int:
        """Requests that its servers accept from this process at once, at present; at least 1."""

    @property
    def away(self) -> str:
        """Why none of its servers can be asked now; empty if one can, while they sleep, or before the first check."""

    async def call(self, path: str, body: Mapping[str, Any], *, deadline: float, tokens: int = 0) -> Mapping[str, Any]:
        """Post `body` as JSON to `path` of a server that can take it, and return its answer.

        Safe to repeat and to cancel. A failed request goes to other servers as long as there is time.

        Args:
            path: below the server's URL, with its leading slash.
            body: of the request.
            deadline: seconds from now for everything: waiting for a slot, for the rate limit, and for other servers.
            tokens: estimated cost of the request, for the rate limit.

        Raises:
            RewardUnavailable: no server can be asked now, or (`RewardBusy`) all are busy. A reward should not catch it.
            Unreachable: no answer within `deadline`, or answers that are errors of the servers.
            DataError: the request itself is refused, so a repeat does not help.
            WireError: an answer that cannot be read.
        """

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[Mapping[str, Any]], Read],
        *,
        deadline: float,
        tokens: int = 0,
    ) -> Read:
        """As `call`, and return what `read` makes of the answer.

        `read` raises `WireError` for an answer that makes no sense (a number is missing, or NaN). That counts as a
        fault of the server, and another one is asked.
        """


async def _no_scores() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class RewardContext:
    """What a reward may use while it is open.

    Attributes:
        config: of the run.
        run_dir: of the run; a reward writes below `run_dir/rewards/NAME` only, and other workers may do so, too.
        models: `reward_models` by name.
        worker: name of the role, for example `reward.0`; empty outside of a run.
        deadline: seconds after which one attempt of this reward is cancelled; its own time limits should be shorter.
        scored: returns whether the run has scores already.
    """

    config: RunConfig
    run_dir: Path
    models: Mapping[str, AskedModel] = field(default_factory=dict)
    worker: str = ""
    deadline: float = 30.0
    scored: Callable[[], Awaitable[bool]] = _no_scores

    def model(self, name: str) -> AskedModel:
        """The entry of `reward_models` with this name; `ConfigError` if there is none."""
        check_model(name, self.models)
        return self.models[name]


def check_model(name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"reward_models has: {', '.join(names)}"
        if not names:
            hint = f"add it: reward_models: {{{name}: {{...}}}}"
        raise ConfigError(f"there is no reward model {name!r}", hint)


class RewardLife:
    """The life of a reward in one worker: `open`, then scores, then `close`. The base of both kinds of rewards.

    `deadline`: seconds of one attempt, unless the run file gives them; None: `reward_worker.deadline`. Waiting for a
    slot does not count. `concurrency`: calls at the same time in one worker, unless the run file gives it; None: no
    limit.
    """

    deadline: float | None = None
    concurrency: int | None = None

    def check_config(self, config: RunConfig) -> None:
        """Raise `ConfigError` for a configuration that can never work with this reward; nothing by default.

        `streamrl up` and `streamrl config validate` call it before anything runs, so it must be quick and work without
        servers or network.
        """

    async def open(self, context: RewardContext) -> None:
        """Prepare: called before the first score, in the event loop of each worker; nothing by default.

        While a service is away, opening is retried: after `RewardUnavailable`, a network error, or an HTTP status that
        allows another attempt, `close` and `open` are called again after a pause, for up to 90 % of
        `supervisor.start_deadline`. Any other error ends the run at once; a `ConfigError` does so with its hint.
        """

    async def close(self) -> None:
        """Release what `open` acquired: called once for each `open`, also for one that failed."""

    def slots(self) -> int | None:
        """Calls that its servers can take at present; None: any number. Asked before each call.

        `concurrency` is an upper limit as well. Must be cheap and must not fail.
        """
        return None

    def away(self) -> str:
        """Why it cannot score now, for the screens; empty: it can, or nothing is known. Must be cheap and not fail."""
        return ""

    def counts(self) -> Mapping[str, int]:
        """The reward's own counts since the process began, by name; shown with its metrics."""
        return {}


class Reward(RewardLife, ABC):
    """Base class of rewards. `args:` of the run file are the keyword arguments of the constructor.

    `instant` says that scoring takes microseconds and cannot hang, so the worker calls it without a deadline, a thread
    or a task. Only pure rules may set it.
    """

    instant: ClassVar[bool] = False

    @abstractmethod
    async def score(self, sample: RewardSample) -> Score | float:
        """Score one response.

        An exception is not a bad score: the sample is tried again (`reward_worker.attempts`, with a pause), then
        `on_failure` decides (docs/guides/failing-rewards.md). After `RewardUnavailable` (no server can score now) the
        sample waits, and no attempt is counted. Cancelled at its deadline, which counts as a failed attempt.

        Args:
            sample: the response with its prompt.

        Returns:
            A finite number, or a `Score` with its parts.
        """


class GroupReward(RewardLife, ABC):
    """Base class of rewards that compare the responses to one prompt.

    A run with one of these scores whole groups: rewards of single samples are then called for each sample of the group.
    """

    @abstractmethod
    async def score_group(self, samples: Sequence[RewardSample]) -> Sequence[Score | float]:
        """Score the responses to one prompt together.

        Args:
            samples: the samples that are left when the comparison begins: generated, held back by no gate, and failed
                by no reward; in the order of `index`, at least one. A slow reward of the same stage runs concurrently,
                so samples that it fails may be among them.

        Returns:
            One number or `Score` per sample, in their order. Another number of them, or a value that is not finite,
            fails the whole call, with the rules of `Reward.score`.
        """
