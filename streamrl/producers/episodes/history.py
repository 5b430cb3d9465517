"""The tree that is being recorded: which branch a conversation extends, and where it forks.

Messages are nodes of a tree, known by the node before them and by what they say, without ids of calls; a reply also
without its reasoning, which many clients drop. Each list of tools has a tree. Ids decide what is recorded: a
conversation that cannot be extended is rendered as a whole, and continues the longest branch whose ids it begins with.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, get_args

import numpy as np
import orjson

from streamrl.engine import Completion
from streamrl.errors import DataError
from streamrl.images.encoded import names_of
from streamrl.producers.episodes.rendering import ChatRenderer, Message, Reply, ToolCall, ToolSchema
from streamrl.wire import NOTHING, PROMPT, Int32Array, Role, ToolUse, Turn, pack_int32, utf8


@dataclass(slots=True, eq=False)
class RecordedTurn:
    """A turn of the sample; `completion` is None for one that was observed, `conversation` ends with a sampled one."""

    parent: int
    ids: Int32Array
    completion: Completion | None = None
    role: Role = "assistant"
    reward: float | None = None
    tools: list[ToolUse] = field(default_factory=list)
    tool_seconds: float = 0.0
    ended_at: float = 0.0
    text: str = ""
    children: int = 0
    conversation: Sequence[Message] = ()
    media: list[str] = field(default_factory=list)

    @property
    def sampled(self) -> bool:
        return self.completion is not None

    def wire(self, messages: list[Message]) -> Turn:
        done = self.completion
        return Turn(
            parent=self.parent,
            role=self.role,
            sampled=len(self.ids) if done else 0,
            observed=b"" if done else pack_int32(self.ids),
            finish=done.finish if done else "",
            reward=self.reward,
            tools=self.tools,
            media=self.media,
            model_seconds=round(done.seconds, 4) if done else 0.0,
            tool_seconds=round(self.tool_seconds, 4),
            cached=done.cached_tokens if done else 0,
            messages=messages,
        )


@dataclass(slots=True, eq=False)
class _Node:
    message: Message | None = None
    children: dict[bytes, _Node] = field(default_factory=dict)
    opened: int | None = None  # the turn that a reply was sampled after
    ended: int | None = None  # the turn of the sampled reply that this is


@dataclass(frozen=True, slots=True, eq=False)
class NextTurn:
    """Where a reply will be recorded: after turn `parent` and `observed` ids; `agreed` messages are recorded.

    `images` are those of `ids`, by their hash, in the order of their tokens.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    parent: int
    observed: list[int]
    ids: Int32Array
    agreed: int
    images: list[str]


class History:
    """The tree of one sample, whose branches may begin with the ids of `prompt`; `forks` counts branches less 1.

    `images` are those of the prompt, by their hash.
    """

    def __init__(self, renderer: ChatRenderer, prompt: Int32Array, images: Sequence[str] = ()) -> None:
        self._renderer, self._prompt, self._images = renderer, prompt, list(images)
        self._roots: dict[bytes, tuple[tuple[ToolSchema, ...], _Node]] = {}
        self.turns: list[RecordedTurn] = []
        self.forks = 0

    def ids(self, turn: int) -> Int32Array:
        pieces = []
        while turn >= 0:
            pieces.append(self.turns[turn].ids)
            turn = self.turns[turn].parent
        return np.concatenate([self._prompt if turn == PROMPT else self._prompt[:0], *pieces[::-1]])

    def place(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> NextTurn:
        """Find where a conversation goes on; changes nothing. DataError: the messages cannot be rendered."""
        if not messages:
            raise DataError("a conversation without messages")
        path = self._walk(messages, self._root(tools))
        node = path[-1]
        if len(path) == len(messages) + 1 and node.opened is not None:  # the same request again
            return self._placed(messages, tools, node.opened, [], len(messages))
        path = self._alike(messages, tools, path)
        at = _last_reply(path, len(messages))
        ended = path[at].ended
        if ended is not None:
            known = [seen.message for seen in path[1 : at + 1] if seen.message is not None]
            delta = self._renderer.extend(
                known, tools or None, self.ids(ended).tolist(), messages[at:], sampled=len(self.turns[ended].ids)
            )
            if delta is not None:
                return self._placed(messages, tools, ended, delta, len(path) - 1)
        whole = np.asarray(self._renderer.render(messages, tools or None), dtype=np.int32)
        parent, kept = self._continued(whole, names_of(messages))
        return self._placed(messages, tools, parent, whole[kept:].tolist(), len(path) - 1)

    def record(
        self,
        place: NextTurn,
        completion: Completion,
        reply: Reply,
        *,
        uses: Sequence[ToolUse] = (),
        away: float = 0.0,
        stopped: str = "",
    ) -> int:
        """Add the observed turn of a place, if it has one, and the reply. Return the number of the sampled turn."""
        self.forks += self._continued_before(place.parent)
        node = self._node(place)
        parent = place.parent
        if place.observed:
            if node.opened is None or self.turns[node.opened].parent != place.parent:
                observed = np.asarray(place.observed, dtype=np.int32)
                said = place.messages[-1].get("role")
                role: Role = said if said in get_args(Role) else "user"  # type: ignore[assignment]
                turn = RecordedTurn(
                    parent,
                    observed,
                    role=role,
                    tools=list(uses),
                    tool_seconds=away,
                    media=place.images[self._shown(parent) :],
                )
                node.opened = self._add(turn)
            parent = node.opened
        node.opened = parent
        said_so_far = (*place.messages, reply.message)
        number = self._add(RecordedTurn(parent, completion.tokens, completion, conversation=said_so_far))
        said = _Node(reply.message, ended=number)
        # Some agents (smolagents) put back the text that ended the reply.
        spoken = [reply.message, {**reply.message, "content": f"{reply.message['content']}{stopped}"}]
        for key in {_key({**message, **bare}) for message in spoken for bare in ({}, {"reasoning_content": None})}:
            if not self._goes_on(node.children.get(key)):
                node.children[key] = said
        return number

    def forks_with(self, places: Iterable[NextTurn]) -> int:
        """What `forks` will be when all these places are recorded."""
        parents = Counter(max(place.parent, -1) for place in places)
        return self.forks + sum(n - (not self._continued_before(parent)) for parent, n in parents.items())

    def drop(self, turns: Collection[int]) -> set[int]:
        """Take out `turns` that nothing continued or rewarded, and what was observed for them; returns sampled ones."""
        gone: set[int] = set()
        for number, turn in reversed(list(enumerate(self.turns))):  # children come after their parents
            if not turn.children and (not turn.sampled or (number in turns and turn.reward is None)):
                gone.add(number)
                if turn.parent >= 0:
                    self.turns[turn.parent].children -= 1
        sampled = {number for number in gone if self.turns[number].sampled}
        kept = [number for number in range(len(self.turns)) if number not in gone]
        numbers = {number: at for at, number in enumerate(kept)}
        self.turns = [self.turns[number] for number in kept]
        for turn in self.turns:
            turn.parent = numbers.get(turn.parent, turn.parent)
        return sampled

    def wire(self) -> list[Turn]:
        return [turn.wire(_portable(self._said(turn)) if turn.sampled else []) for turn in self.turns]

    def _said(self, turn: RecordedTurn) -> Sequence[Message]:
        if turn.parent == PROMPT:
            return turn.conversation[-1:]
        parent = turn.parent
        while parent >= 0 and not self.turns[parent].sampled:
            parent = self.turns[parent].parent
        return turn.conversation[len(self.turns[parent].conversation) if parent >= 0 else 0 :]

    def _add(self, turn: RecordedTurn) -> int:
        if turn.parent >= 0:
            self.turns[turn.parent].children += 1
        self.turns.append(turn)
        return len(self.turns) - 1

    def _goes_on(self, node: _Node | None) -> bool:
        """Whether a reply was continued: the conversation that did so finds its next turn by this node."""
        return node is not None and node.ended is not None and self.turns[node.ended].children > 0

    def _root(self, tools: Sequence[ToolSchema]) -> _Node:
        return self._roots.setdefault(_digest(list(tools)), (tuple(tools), _Node()))[1]

    def _walk(self, messages: Sequence[Message], root: _Node) -> list[_Node]:
        """The root of a tree, and the nodes of the first messages, as many as are known."""
        path = [root]
        for message in messages:
            following = path[-1].children.get(_key(message))
            if following is None:
                break
            path.append(following)
        return path

    def _alike(self, messages: Sequence[Message], tools: Sequence[ToolSchema], path: list[_Node]) -> list[_Node]:
        """The path to the last known reply, with other tools if these change nothing of what stands before it."""
        for others, root in self._roots.values():
            other = self._walk(messages, root)
            at = _last_reply(other, len(messages))
            if at > _last_reply(path, len(messages)):
                before = messages[: at - 1]
                if self._renderer.render(before, tools or None) == self._renderer.render(before, others or None):
                    path = other
        return path

    def _node(self, place: NextTurn) -> _Node:
        path = self._walk(place.messages, self._root(place.tools))
        node = path[-1]
        for message in place.messages[len(path) - 1 :]:
            node.children[_key(message)] = following = _Node(dict(message))
            node = following
        return node

    def _placed(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], parent: int, observed: list[int], agreed: int
    ) -> NextTurn:
        ids = np.concatenate([self.ids(parent), np.asarray(observed, dtype=np.int32)])
        return NextTurn(tuple(messages), tuple(tools), parent, observed, ids, agreed, names_of(messages))

    def _shown(self, turn: int) -> int:
        """How many images stand in the branch up to a turn."""
        shown = 0
        while turn >= 0:
            shown += len(self.turns[turn].media)
            turn = self.turns[turn].parent
        return shown + (len(self._images) if turn == PROMPT else 0)

    def _continued(self, whole: Int32Array, images: list[str]) -> tuple[int, int]:
        """The last turn of the longest branch whose ids and images these begin with, and how many they are."""
        count, shown = len(self._prompt), len(self._images)
        ends = {NOTHING: (0, 0)}  # where in both the branch up to a turn ends, if they begin with that
        if count and np.array_equal(whole[:count], self._prompt) and images[:shown] == self._images:
            ends[PROMPT] = count, shown
        for number, turn in enumerate(self.turns):  # children come after their parents
            if turn.parent not in ends:
                continue
            begin, first = ends[turn.parent]
            end, last = begin + len(turn.ids), first + len(turn.media)
            alike = np.array_equal(whole[begin:end], turn.ids) and images[first:last] == turn.media
            if alike and end + turn.sampled <= len(whole):
                ends[number] = end, last
        parent = max(reversed(ends), key=lambda turn: (ends[turn][0], self._continued_before(turn)))
        return parent, ends[parent][0]

    def _continued_before(self, parent: int) -> bool:
        """Whether one more turn after `parent` begins a branch besides the first."""
        return bool(self.turns) if parent < 0 else self.turns[parent].children > 0


def _last_reply(path: Sequence[_Node], most: int) -> int:
    """Where in a path the last sampled reply is that other messages follow, of `most` in all; 0: none."""
    return max((at for at, seen in enumerate(path) if seen.ended is not None and at < most), default=0)


def calls_key(calls: Sequence[ToolCall]) -> bytes:
    return _digest([[call.id, call.name, call.arguments] for call in calls])


def _key(message: Message) -> bytes:
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    calls = [{"name": each.get("name"), "arguments": _arguments(each.get("arguments"))} for each in functions]
    content = _content(message.get("content"))
    if message.get("role") == "assistant" and isinstance(content, str):
        content = content.strip()  # as many agents do with what the model wrote
    reasoning = message.get("reasoning_content") or None
    said = [message.get(name) for name in ("role", "tool_call_id", "name")]
    return _digest([*said, content, reasoning, calls])


def _content(content: Any) -> Any:
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    return "" if content is None else content


def _arguments(arguments: Any) -> Any:
    try:
        return json.loads(arguments)
    except (TypeError, ValueError):  # no text, or no JSON
        return arguments


def _portable(messages: Sequence[Message]) -> list[Message]:
    """Copies that MessagePack can hold: numbers of at most 64 bits, whole characters."""
    try:
        copies: list[Message] = orjson.loads(orjson.dumps(messages))
    except orjson.JSONEncodeError:
        text = utf8(json.dumps(messages, ensure_ascii=False))
        copies = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits))
    return copies


def _digest(value: Any) -> bytes:
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # a number of more than 64 bits, or half a surrogate pair
        try:
            text = json.dumps(value, sort_keys=True).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"messages and tools must be JSON: {error}") from error
    return blake2b(text, digest_size=16).digest()
