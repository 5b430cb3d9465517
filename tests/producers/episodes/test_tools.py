"""Functions as tools: what the model reads of them, and what it is told whatever goes wrong."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from typing import Literal

import pytest
from producer_kit import until

from streamrl.errors import PluginError
from streamrl.producers.episodes import tools
from streamrl.producers.episodes.clock import EpisodeOver
from streamrl.producers.episodes.rendering import ToolCall
from streamrl.producers.episodes.tools import Tool, Toolbox, cut, in_thread


def search(words: list[str], deep: bool = False, place: Literal["web", "mail"] | None = None) -> str:
    """Search for words.

    More about it.

    Args:
        words (list): what to look for,
            all of them.
        deep: look everywhere.

    Returns:
        What was found.
    """
    return f"{words} {deep} {place}"


async def slow(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "woken"


def hang(x: int = 0) -> str:
    """Never return."""
    threading.Event().wait()
    return ""


def fails(x: int = 0) -> str:
    """Raise."""
    raise KeyError("no such thing")


def leaves(x: int = 0) -> str:
    """End the process."""
    sys.exit(3)


async def interrupts(x: int = 0) -> str:
    """Raise what Ctrl-C raises."""
    raise KeyboardInterrupt


def interrupts_thread(x: int = 0) -> str:
    """Raise what Ctrl-C raises, in a thread."""
    raise KeyboardInterrupt


released = threading.Event()


def block(x: int = 0) -> str:
    """Block a thread."""
    released.wait()
    return "late"


async def cancels(x: int = 0) -> str:
    """Cancel itself."""
    raise asyncio.CancelledError


def picture(x: int = 0) -> bytes:
    """Return bytes that are no image."""
    return b"abc"


def thing(x: int = 0) -> object:
    """Return something odd."""
    return object()


def long(x: int = 0) -> str:
    """Return 10 MB."""
    return "a" * 5_000_000 + "b" * 5_000_000


def found(x: int = 0) -> dict[str, object]:
    """Return JSON."""
    return {"a": [1, None, True]}


def half(x: int = 0) -> str:
    """Return half a character."""
    return "\ud83d"


def stops(x: int = 0) -> str:
    """End the episode."""
    raise EpisodeOver("tool_stopped")


FAILING = [fails, leaves, interrupts, interrupts_thread, cancels, picture, thing]
BOX = Toolbox.of([search, slow, hang, *FAILING, long, found, half, stops])


def test_the_schema_is_the_signature_and_the_docstring():
    assert Tool.of(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search for words.\n\nMore about it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "words": {
                        "type": "array",
                        "items": {"type": "string"},
                        "description": "what to look for, all of them.",
                    },
                    "deep": {"type": "boolean", "description": "look everywhere.", "default": False},
                    "place": {"anyOf": [{"enum": ["mail", "web"]}, {"type": "null"}], "default": None},
                },
                "required": ["words"],
                "additionalProperties": False,
            },
        },
    }


def test_what_cannot_be_a_tool_is_refused():
    def undocumented(x: int) -> int:
        return x

    def untyped(x) -> int:
        """Do."""

    def unknown(x: threading.Thread) -> int:
        """Do."""

    def many(*x: int) -> int:
        """Do."""

    for function, why in ((undocumented, "docstring"), (untyped, "annotation"), (unknown, "schema"), (many, "by name")):
        with pytest.raises(PluginError, match=why):
            Tool.of(function)
    with pytest.raises(PluginError, match="same name"):
        Toolbox.of([search, search])


def called(name, status="ok", **arguments):
    return ToolCall("call_1", name, arguments, status, "raw")


@pytest.mark.parametrize(
    ("call", "outcome", "text"),
    [
        (called("search", words=["a"], deep=True), "ok", "['a'] True None"),
        (called("slow", seconds=0), "ok", "woken"),
        (called("found"), "ok", '{"a":[1,null,true]}'),
        (called("half"), "ok", "?"),
        (called("fails"), "error", "error: KeyError: 'no such thing'"),
        (called("leaves"), "error", "it raised SystemExit: 3"),
        (called("interrupts"), "error", "it raised KeyboardInterrupt"),
        (called("interrupts_thread"), "error", "it raised KeyboardInterrupt"),
        (called("cancels"), "error", "it raised CancelledError"),
        (called("picture"), "error", "3 bytes where text is expected"),
        (called("thing"), "error", "returned a object, which is no text"),
        (called("hang"), "timeout", "no answer within 0.2 s"),
        (called("slow", seconds=60), "timeout", "no answer within 0.2 s"),
        (called("serch"), "unknown", "did you mean search?"),
        (called("search"), "malformed", "missing required field `words`"),
        (called("search", words="a"), "malformed", "Expected `array`, got `str` - at `$.words`"),
        (called("search", words=[], colour=1), "malformed", "unknown field `colour`"),
        (called("", status="malformed"), "malformed", "could not be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_each_call_is_answered(call, outcome, text):
    result = await BOX.call(call, deadline=0.2, longest=200)
    assert (result.use.name, result.use.outcome) == (call.name, outcome)
    assert text in result.message["content"]
    assert result.message["tool_call_id"] == "call_1"
    assert result.use.seconds >= (0.2 if outcome == "timeout" else 0)


async def test_a_long_answer_is_cut_in_the_middle_with_a_note():
    result = await BOX.call(called("long"), deadline=30, longest=100)
    text = result.message["content"]
    assert text.startswith("a" * 50)
    assert text.endswith("b" * 50)
    assert "[9999900 characters left out]" in text
    assert cut("short", 5) == "short"


async def test_a_tool_may_end_the_episode_and_is_cancelled_with_it():
    with pytest.raises(EpisodeOver, match="tool_stopped"):
        await BOX.call(called("stops"), deadline=1, longest=10)
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await BOX.call(called("hang"), deadline=60, longest=10)
    assert time.monotonic() - begun < 10


class Swallowing:
    """A tool with a retry loop that swallows cancellation; it ends when `let_go` is set."""

    def __init__(self):
        self.let_go = False

    async def fetch(self, x: int = 0) -> str:
        """Fetch."""
        while not self.let_go:
            try:
                await asyncio.sleep(60)
            except:  # noqa: E722
                continue
        return "late"


async def test_a_tool_that_swallows_cancellation_is_left_behind_counted_and_named(monkeypatch):
    monkeypatch.setattr(tools, "left_behind", left := tools.LeftBehind())
    swallowing = Swallowing()
    box = Toolbox.of([swallowing.fetch, block])
    result = await box.call(called("fetch"), deadline=0.1, longest=200)
    assert (result.use.outcome, result.message["content"]) == ("timeout", "error: no answer within 0.1 s")
    assert (await box.call(called("block"), deadline=0.1, longest=200)).use.outcome == "timeout"
    assert left.lasting(0) == {"tool fetch": 1, "tool block": 1}
    assert left.lasting(60) == {}
    swallowing.let_go = True
    for task in list(left._going_on):
        task.cancel()
    released.set()
    await until(lambda: not left)


async def test_what_was_left_behind_is_free_after_its_end(monkeypatch):
    monkeypatch.setattr(tools, "left_behind", left := tools.LeftBehind())
    monkeypatch.setattr(tools, "_GRACE", 0.0)
    swallowing = Swallowing()
    await Toolbox.of([swallowing.fetch]).call(called("fetch"), deadline=0.1, longest=200)
    [task] = left._going_on
    held = weakref.ref(task)
    swallowing.let_go = True
    task.cancel()
    del task
    await until(lambda: not left)
    gc.collect()
    assert held() is None


LEAVE_BEHIND = """
import asyncio
from streamrl.producers.episodes.rendering import ToolCall
from streamrl.producers.episodes.tools import Toolbox

async def fetch() -> str:
    'Fetch.'
    while True:
        try:
            await asyncio.sleep(60)
        except:
            continue

asyncio.run(Toolbox.of([fetch]).call(ToolCall("1", "fetch", {}, "ok", ""), deadline=0.1, longest=200))
print("ended")
"""


def test_what_is_left_behind_does_not_hold_the_end_of_its_event_loop():
    ran = subprocess.run([sys.executable, "-c", LEAVE_BEHIND], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "ended\n"
    assert "destroyed" not in ran.stderr


async def test_waiting_for_a_slot_is_not_time_of_the_call():
    released = asyncio.Event()

    async def wait(x: int) -> str:
        """Wait."""
        await released.wait()
        return "released"

    box = Toolbox([replace(Tool.of(wait), slots=asyncio.Semaphore(1))])
    first = asyncio.create_task(box.call(called("wait", x=1), deadline=60, longest=100))
    second = asyncio.create_task(box.call(called("wait", x=2), deadline=0.05, longest=100))
    done, _ = await asyncio.wait([first, second], timeout=0.5)
    assert not done
    released.set()
    assert [(await call).use.outcome for call in (first, second)] == ["ok", "ok"]
    assert (await second).use.seconds >= 0.4


async def test_threads_of_tools_end_with_their_work():
    before, together = tool_threads(), threading.Barrier(9)
    calls = [asyncio.create_task(in_thread(together.wait, "wait")) for _ in range(8)]
    await until(lambda: together.n_waiting == 8)
    assert tool_threads() == before + 8
    together.wait()
    await asyncio.gather(*calls)
    await until(lambda: tool_threads() == before)


def tool_threads():
    return sum(thread.name == "tool" for thread in threading.enumerate())
