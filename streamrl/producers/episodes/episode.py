"""What users write: an `Episode` that talks to the policy through a `Chat`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from streamrl.errors import DataError
from streamrl.producers.episodes.messages import text_of
from streamrl.producers.episodes.rendering import Message, Reply
from streamrl.producers.episodes.session import EpisodeSession, SampledTurn
from streamrl.producers.episodes.tools import Toolbox, ToolsLike
from streamrl.score import Score
from streamrl.wire import Prompt, StopReason


@dataclass(frozen=True, slots=True)
class Task:
    """One line of the data set, as an episode gets it.

    `messages` are those of the line, or its text as one message of the user. `text` is that text, or what the user says
    last. `rendered` is what the chat template makes of the messages of the line; empty: the line has text. `line` is
    the line of the data set, from 0. `evaluation` marks held-out prompts.
    """

    text: str
    messages: list[Message]
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    line: int = 0
    evaluation: bool = False
    rendered: str = ""

    @classmethod
    def of(cls, prompt: Prompt) -> Task:
        """The task of a prompt; its messages are copies that may be changed."""
        if prompt.images and not prompt.messages:
            raise DataError("an episode on a `prompt` with `images`", 'give `messages` with parts {"type": "image"}')
        text, rendered = prompt.text, ""
        if prompt.messages:
            said = [message.get("content") for message in prompt.messages if message["role"] == "user"]
            text, rendered = text_of(said[-1] if said else None), prompt.text
        messages = [dict(message) for message in prompt.messages or [{"role": "user", "content": text}]]
        return cls(text, messages, prompt.answer, prompt.metadata, prompt.line, prompt.evaluation, rendered)


class Chat:
    """The policy as an episode talks to it: messages in, one message out, token-exact.

    It keeps no conversation: each call gets all its messages. A list that begins with an earlier one and its reply
    continues that branch with the recorded tokens; any other list begins a branch of its own.
    """

    def __init__(self, session: EpisodeSession, tools: ToolsLike = ()) -> None:
        self._session = session
        self._toolbox = Toolbox.of(tools)
        self._last: SampledTurn | None = None

    @property
    def session(self) -> EpisodeSession:
        """The sample that is being made, for what needs more than messages: tokens, deadlines, the endpoint."""
        return self._session

    async def __call__(
        self, messages: Sequence[Message], tools: ToolsLike | None = None, max_tokens: int | None = None
    ) -> Reply:
        """Sample the next message.

        Args:
            messages: the whole conversation. Replies are appended as `reply.message`.
            tools: functions, or schemas of tools that the episode calls itself, from here on; None: as before.
            max_tokens: of this reply; None: `sampling.max_new_tokens`.

        Raises:
            ContextOverflow: the messages are too long for the model; a shorter conversation may go on.
            EpisodeOver: a limit of the episode is reached. It may pass: the episode then ends with what there is.
            DataError: the messages cannot be rendered.
        """
        if tools is not None:
            self._toolbox = Toolbox.of(tools)
        self._last = await self._session.sampled(messages, self._toolbox.schemas, max_tokens)
        return self._last.reply

    async def answer(self, reply: Reply) -> list[Message]:
        """Run the calls of a reply, all at the same time, and return one tool message for each, in their order.

        A call that fails is answered by a message that says so; nothing is raised but `EpisodeOver`.
        """
        self._session.check_calls()
        async with self._session.part("tools"):
            return await self._session.answers(reply.calls, self._toolbox)

    def fork(self, tools: ToolsLike | None = None) -> Chat:
        """A chat for a sub-agent of the same sample, with a last turn (and tools) of its own."""
        return Chat(self._session, self._toolbox if tools is None else tools)

    def reward(self, value: float) -> None:
        """Reward the actions of this chat up to its last reply; it is added to an earlier reward of that turn."""
        if self._last is None:
            raise DataError("a reward for a turn before the first reply", "reward a chat after it has answered")
        self._session.reward(value, self._last.number)

    @property
    def cut(self) -> StopReason | None:
        """The limit of tokens that cut the last reply off; None: it ended by itself."""
        return None if self._last is None else self._last.cut


class Episode(ABC):
    """Base class of episodes: `episode.run: module:Class`, `episode.args` are the arguments of its constructor.

    One object serves all samples of a process, many at the same time: what belongs to a sample lives in local variables
    of `run`. `deterministic` says that all its tools give the same answer again, so that another process may replay
    what is recorded; `episode.deterministic` says so, too.
    """

    deterministic: ClassVar[bool] = False

    @abstractmethod
    async def run(self, task: Task, chat: Chat) -> float | Score | None:
        """Play one episode.

        It is cancelled at its deadline. An exception other than `EpisodeOver` fails the sample.

        Returns:
            The score of the episode, for the reward `episode`; None: others score it.
        """

    async def cut_short(self, task: Task, stop: StopReason) -> float | Score | None:
        """Score an episode whose `run` was ended by a limit; None: 0, where the reward `episode` asks for a score."""
        del task, stop
        return None

    async def open(self) -> None:  # noqa: B027 (may be left out)
        """Prepare, once for each process, before the first episode."""

    async def close(self) -> None:  # noqa: B027
        """Release what `open` acquired."""
