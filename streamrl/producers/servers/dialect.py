"""What a server engine is asked and what it answers, as values: each dialect translates, and none of them does I/O.

`ServerEngine` sends the calls and hands the answers back to the dialect that built them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol

from streamrl.http import Call
from streamrl.producers.engines.contract import Finish, MemoryTag, PauseMode, Request, Runs

if TYPE_CHECKING:  # a process that only keeps servers does without torch
    from streamrl.weight_sync.tensors import Version

PROBE: Final = "Two plus 34 is thirty-six; naïve?"
"""Text whose token ids tell whether a server has the tokenizer of the run."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one message of a response's stream brought.

    Attributes:
        tokens: sampled since the message before, and `logprobs` with them, one each.
        finish: set on the last message.
        runs: version runs of the whole response, set on the last message by servers that tell; the others leave None,
            and so does an abort without them.
        prompt_tokens: as the server counted them, when it said.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish: Finish | None = None
    runs: Runs | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """What a server's own metrics say; counters grow from the start of the server."""

    running: int = 0
    waiting: int = 0
    cache_use: float = 0.0
    tokens_sampled: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class About:
    """What a server says of itself at connect.

    Attributes:
        version: of the server's software, as it prints it.
        model: path or name of the model that it loaded.
        context: longest prompt plus response in tokens; None when it does not say.
        vocabulary: tokens of the model; None when it does not say.
        can_update: whether weights can be replaced (development routes and our plug-in are there).
        missing: what is missing for that, in words, with the flag or variable that mends it; empty when nothing, or
            when nothing could mend it (a kind of server whose weights stay as they are).
        probe: ids of `PROBE` by the server's own tokenizer, without special tokens; None when it cannot be asked.
    """

    version: str
    model: str
    context: int | None = None
    vocabulary: int | None = None
    can_update: bool = True
    missing: str = ""
    probe: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started: its command line, and what is added to the environment."""

    argv: Sequence[str]
    environ: Mapping[str, str]


class Dialect(Protocol):
    """Pure translation between `Engine` and one kind of server. No method waits, sends or keeps state.

    Methods that return calls return them in the order in which they are sent, each after the success of the one before.
    Methods that read an answer raise `WireError` when it is not what the server should say.
    """

    kind: ClassVar[str]
    merges: ClassVar[bool]
    """Whether its servers merge a version that is an adapter by themselves; the others load it beside the weights."""

    def launch(self, *, model: str, port: int, seed: int) -> Launch:
        """Return how a server of this kind is started on the loopback interface with all that streamrl needs of it.

        `seed` (0 to 2**31 - 1) is that of its sampling: no two servers of a run may draw the same numbers.
        `engine.variables`, devices and the log are added by who starts it.

        Raises:
            ConfigError: the environment is missing (with the command that installs it), or streamrl starts no such
                servers.
        """
        ...

    def ready(self) -> Call:
        """Cheap and true: 200 when the server can take requests; no call of it may disturb a pause."""
        ...

    def about(self) -> Sequence[Call]:
        """Calls whose answers `read_about` needs."""
        ...

    def read_about(self, answers: Sequence[Any]) -> About:
        """Understand the answers to `about`, in their order (parsed JSON, text where it is none, None for 404)."""
        ...

    def generation(self, request: Request, *, version: int) -> Call:
        """Ask for one response, streamed as server-sent events; `version` isolates the prefix cache."""
        ...

    def chunk(self, message: Any, *, received: int) -> Chunk:
        """Understand one event of the stream, parsed from JSON; `received` tokens came before it.

        Raises:
            WireError: missing or non-finite log-probabilities, counts that do not fit, or no such message.
            DataError: the server refuses the request itself.
        """
        ...

    def abort(self, request_id: str | None, *, paused: bool = False) -> Sequence[Call]:
        """End one request, or all; `paused`: the server stands still, and some need another way then."""
        ...

    def pause(self, mode: PauseMode) -> Sequence[Call]:
        """Stop decoding. Empty: it cannot, and weights change when its last request has ended."""
        ...

    def resume(self) -> Sequence[Call]:
        """Go on; harmless when nothing was paused."""
        ...

    def prefetch(self, version: Version) -> Sequence[Call]:
        """Bring the files near and check names and shapes while the server generates; empty when nothing is to be done.

        An error answer means `WeightsError`, and nothing was changed.
        """
        ...

    def update(self, version: Version) -> Sequence[Call]:
        """Replace the weights and name the version, while the server is paused.

        A refusal (4xx) of the first call means that nothing was changed. After any other failure nobody knows, and
        `prefetch` and `update` are sent once more while the server is still paused; if that fails it counts as dead.

        Raises:
            WeightsError: the version cannot reach such a server.
        """
        ...

    def sleep(self, level: Literal[0, 1, 2]) -> Sequence[Call]:
        """Give memory back.

        Raises:
            Refused: the server has no such level.
        """
        ...

    def wake(self, tags: Sequence[MemoryTag]) -> Sequence[Call]:
        """Undo `sleep`."""
        ...

    def load_adapter(self, name: str, folder: Path) -> Call:
        """Load a LoRA adapter.

        Raises:
            Refused: the server cannot.
        """
        ...

    def unload_adapter(self, name: str) -> Call:
        """Forget a LoRA adapter."""
        ...

    def figures(self) -> Call:
        """Ask for the server's metrics."""
        ...

    def read_figures(self, answer: Any) -> Figures:
        """Understand the answer to `figures`."""
        ...
