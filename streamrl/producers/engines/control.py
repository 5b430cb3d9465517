"""What is done to model and cache between two decode steps: holding still, swapping weights, giving memory back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any, Final, Literal

from streamrl.errors import Refused, WeightsError
from streamrl.producers.engines.adapted import BaseWeights
from streamrl.producers.engines.contract import MemoryTag, PauseMode
from streamrl.producers.engines.decoder import Decoder, Outcome
from streamrl.producers.engines.residence import Residence
from streamrl.producers.engines.weights import copy_weights, match_weights
from streamrl.weight_sync.manifest import Pair
from streamrl.weight_sync.tensors import Version

_ALL: Final[frozenset[MemoryTag]] = frozenset({"weights", "kv_cache"})


class Control:
    """The controls of one decode loop. Every method runs on one control thread and may wait for the running step.

    Args:
        model: that the loop decodes with.
        decoder: the loop, started.
        fail: told of an error that leaves the engine unusable, before it is raised.
    """

    def __init__(self, model: Any, decoder: Decoder, fail: Callable[[BaseException], None]) -> None:
        self._model = model
        self._decoder = decoder
        self._fail = fail
        self._residence = Residence(model)
        self._base = BaseWeights(model)
        self._holds: dict[Literal["pause", "sleep"], ExitStack] = {}
        self._recompute = False
        self._asleep: set[MemoryTag] = set()
        self._freed = False
        self.pair: Pair = (0, 0)

    def take(self, tickets: Collection[int] | None) -> list[Outcome]:
        """End jobs (all when None) and return what they have."""
        with self._decoder.exclusive():
            return self._decoder.take(tickets)

    def close(self) -> list[Outcome]:
        """End all jobs and let go of the loop."""
        try:
            return self.take(None)
        finally:
            for hold in self._holds.values():
                hold.close()
            self._holds.clear()

    def pause(self, mode: PauseMode) -> list[Outcome]:
        """Stop the loop; return the jobs that ended by that."""
        self._hold("pause")
        self._recompute = self._recompute or mode == "recompute"
        return self._decoder.take(None) if mode == "abort" else []

    def resume(self) -> None:
        """Let the loop go on."""
        if "pause" in self._holds and self._recompute:
            try:
                self._decoder.recompute()
            except BaseException as error:
                self._fail(error)
                raise
        self._recompute = False
        self._unhold("pause")

    def apply(self, version: Version) -> None:
        """Check a version and copy it in."""
        pair = version.pair
        if pair == self.pair:
            return
        if pair < self.pair or pair[1] < self.pair[1]:
            raise WeightsError(f"version {pair} of the weights is older than {self.pair}, which is in force")
        if version.adapter is None:
            pairs = match_weights(self._model, version.tensors)
        elif self._residence.forgotten:
            raise WeightsError(
                f"version {version.number} is an adapter, and this engine has given up the weights it belongs to",
                "sleep at level 1, or learner.lora.publish merged",
            )
        else:
            pairs = self._base.match(version)
        with self._decoder.exclusive():
            try:
                self._residence.remember()
                copy_weights(pairs)
                if version.adapter is None:
                    self._base.replaced()
                self._decoder.swapped(version.number)
            except BaseException as error:
                self._fail(error)
                raise
            self.pair = pair
        self._go_on_if_awake()

    def sleep(self, level: int) -> None:
        """Stop decoding and give memory back."""
        if level not in (0, 1, 2):
            raise Refused(f"there is no sleep level {level!r}", "levels are 0, 1 and 2")
        new = "sleep" not in self._holds
        self._hold("sleep")
        if level:
            try:
                self._free_cache()
            except BaseException:
                if new:
                    self._unhold("sleep")
                raise
            if self._residence.leaves_something and level == 2:
                self._residence.forget()
            else:
                self._residence.leave()
        if new or level:
            self._asleep = set(_ALL)

    def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Undo `sleep` or a part of it."""
        if unknown := sorted(set(tags) - _ALL):
            raise Refused(f"there is no memory {', '.join(unknown)}", f"tags are {', '.join(sorted(_ALL))}")
        if "weights" in tags and "weights" in self._asleep:
            self._residence.come_home()
        self._asleep -= set(tags)
        self._go_on_if_awake()

    def _free_cache(self) -> None:
        if not self._freed:
            self._decoder.release()
            self._freed = True

    def _go_on_if_awake(self) -> None:
        """Decode again when nothing is asleep any more and there are weights to decode with."""
        if "sleep" not in self._holds or self._asleep or self._residence.forgotten:
            return
        if self._freed:
            self._decoder.restore()
            self._freed = False
        self._unhold("sleep")

    def _hold(self, why: Literal["pause", "sleep"]) -> None:
        if why not in self._holds:
            stack = ExitStack()
            stack.enter_context(self._decoder.exclusive())
            self._holds[why] = stack

    def _unhold(self, why: Literal["pause", "sleep"]) -> None:
        stack = self._holds.pop(why, None)
        if stack is not None:
            stack.close()
