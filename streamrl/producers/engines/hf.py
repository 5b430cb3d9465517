"""The Hugging Face engine: any causal language model, in this process.

Three threads: the event loop's, which owns requests and futures; the decode thread, which owns model and cache; a
control thread, which asks the decode thread to stand still and then loads, swaps or frees weights. Results cross to
the event loop in batches, one `call_soon_threadsafe` per decode step; requests that start in one turn of the event loop
reach the decoder together.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch

from streamrl.config import RunConfig
from streamrl.errors import DataError, DeadlineExceeded, Unreachable, WeightsError
from streamrl.producers.engines.continuous import ContinuousDecoder
from streamrl.producers.engines.contract import Completion, EngineLoad, Request
from streamrl.producers.engines.decoder import Decoder, Job, Outcome
from streamrl.producers.engines.model import choose_decode, context_length, load_model, stop_tokens
from streamrl.producers.engines.slot_decoder import SlotDecoder
from streamrl.producers.engines.slots import SlotBatch
from streamrl.producers.engines.weights import copy_weights, match_weights
from streamrl.weight_sync.manifest import Pair
from streamrl.weight_sync.version import Version

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")
WATCH_SECONDS = 0.25
LOAD_SECONDS = 1800.0


class HfEngine:
    """`Engine` on transformers, with either decode loop (`engine.decode`).

    Args:
        config: the run; `engine`, `model`, `weights.deadline`, `lease.max_hold` are read.
        seed: of the sampling generator; replicas need different ones.
    """

    def __init__(self, config: RunConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._patience = config.weights.deadline
        # A step that takes half of what a whole response may take is no slow step, and ends before it costs a response.
        self._longest_step = min(config.weights.deadline, config.lease.max_hold / 2)
        self._steps = 0
        self._still = 0.0
        self._looked_at = 0.0
        self._model: Any = None
        self._decoder: Decoder | None = None
        self._context = 0
        self._vocabulary = 0
        self._pair: Pair = (0, 0)
        self._failure: BaseException | None = None
        self._started = False
        self._closed = False
        self._tickets = itertools.count(1)
        self._named: dict[str, int] = {}
        self._open: dict[int, asyncio.Future[Outcome]] = {}
        self._arrived: list[Job] = []
        self._holds: dict[Literal["pause", "sleep"], ExitStack] = {}
        self._control = ThreadPoolExecutor(1, thread_name_prefix="engine-control")
        self._watcher: asyncio.Task[None] | None = None

    @property
    def decode(self) -> Literal["slots", "continuous"]:
        """Which decode loop runs."""
        return "slots" if isinstance(self._decoder, SlotDecoder) else "continuous"

    async def start(self) -> None:
        """See `Engine.start`."""
        self._loop = asyncio.get_running_loop()
        self._started = True
        await self._run(LOAD_SECONDS, self._build)
        self._looked_at = self._loop.time()
        self._watcher = asyncio.create_task(self._watch(), name="engine-watch")
        self._watcher.add_done_callback(self._watched)

    async def close(self) -> None:
        """See `Engine.close`."""
        if self._closed:
            return
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        # what hangs cannot be torn down: it is left to the end of the process
        if self._started and not isinstance(self._failure, DeadlineExceeded):
            self._flush()
            try:
                # on the control thread, so after a start that was cancelled half-way
                self._resolve(await self._run(self._patience, self._tear_down))
            except Unreachable:
                logger.exception("engine does not stop")
        self._fail_open(Unreachable("the engine was closed"))
        self._control.shutdown(wait=False, cancel_futures=True)

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`."""
        decoder = self._serving()
        limit = self._check(request)
        if request.id in self._named:
            raise ValueError(f"a request {request.id!r} is in flight")
        ticket = next(self._tickets)
        future: asyncio.Future[Outcome] = self._loop.create_future()
        self._named[request.id], self._open[ticket] = ticket, future
        if not self._arrived:
            self._loop.call_soon(self._flush)
        self._arrived.append(Job(ticket, tuple(request.tokens.tolist()), limit, request.temperature))
        start = self._loop.time()
        try:
            outcome = await future
        except asyncio.CancelledError:
            self._flush()
            decoder.discard(ticket)
            raise
        finally:
            del self._named[request.id], self._open[ticket]
        return Completion(
            tokens=np.asarray(outcome.tokens, dtype=np.int32),
            logprobs=np.asarray(outcome.logprobs, dtype=np.float32),
            runs=outcome.runs,
            finish=outcome.finish,
            prompt_tokens=len(request.tokens),
            seconds=self._loop.time() - start,
        )

    async def abort(self, request_id: str | None = None) -> int:
        """See `Engine.abort`."""
        decoder = self._serving()
        self._flush()
        if request_id is not None and request_id not in self._named:
            return 0
        tickets = None if request_id is None else {self._named[request_id]}

        def take() -> list[Outcome]:
            with decoder.exclusive():
                return decoder.take(tickets)

        return self._resolve(await self._run(self._patience, take))

    async def pause(self) -> None:
        """See `Engine.pause`."""
        await self._run(self._patience, self._hold, self._serving(), "pause")

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._serving()
        await self._run(self._patience, self._unhold, "pause")

    async def apply(self, version: Version) -> None:
        """See `Engine.apply`."""
        await self._run(self._patience, self._swap, self._serving(), version.pair, version.tensors)

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        await self._run(self._patience, self._sleep, self._serving())

    async def wake(self) -> None:
        """See `Engine.wake`."""
        await self._run(self._patience, self._wake, self._serving())

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        if self._decoder is None:
            return EngineLoad(0, 0, 0, 0.0, self._pair[1])
        running, waiting, tokens, busy = self._decoder.counts()
        return EngineLoad(running, waiting + len(self._arrived), tokens, busy, self._pair[1])

    async def health(self) -> None:
        """See `Engine.health`."""
        self._look()
        self._serving()

    # --- event loop's thread ---------------------------------------------------------------------------------------

    def _serving(self) -> Decoder:
        """The decoder, when it can serve."""
        if self._decoder is None or self._closed:
            raise Unreachable("the engine is closed" if self._closed else "the engine has not been started")
        failure = self._failure or self._decoder.failure()
        if failure is not None:
            raise _death(failure) from failure
        return self._decoder

    def _check(self, request: Request) -> int:
        """Refuse what can never be served; return how many tokens the response may have."""
        tokens = request.tokens
        room = self._context - len(tokens)
        if tokens.ndim != 1 or not len(tokens):
            raise DataError(f"request {request.id!r} has an empty prompt")
        if room < 1:
            raise DataError(f"request {request.id!r}: {len(tokens)} prompt tokens fill a context of {self._context}")
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            raise DataError(f"request {request.id!r} has a token outside the vocabulary of {self._vocabulary}")
        if request.max_new_tokens < 1:
            raise DataError(f"request {request.id!r}: max_new_tokens is {request.max_new_tokens}")
        if not (0 < request.temperature < math.inf):
            raise DataError(f"request {request.id!r}: temperature is {request.temperature}")
        return min(request.max_new_tokens, room)

    def _flush(self) -> None:
        """Hand the requests of this turn of the event loop to the decoder."""
        if self._arrived and self._decoder is not None:
            jobs, self._arrived = self._arrived, []
            self._decoder.submit(jobs)

    def _resolve(self, outcomes: list[Outcome]) -> int:
        """Complete futures; return how many still waited."""
        count = 0
        for outcome in outcomes:
            future = self._open.get(outcome.ticket)
            if future is None or future.done():
                continue
            count += 1
            if outcome.error is not None:
                if isinstance(outcome.error, Unreachable):
                    self._fail(outcome.error)  # before anybody can ask for the health and hear of none
                future.set_exception(outcome.error)
            else:
                future.set_result(outcome)
        return count

    def _fail_open(self, error: Exception) -> None:
        for future in list(self._open.values()):
            if not future.done():
                future.set_exception(error)

    async def _watch(self) -> None:
        """Fail all requests as soon as the decode loop is dead or hangs; it tells nobody itself."""
        while True:
            self._look()
            if self._failure is not None:
                logger.error("engine died", extra={"cause": repr(self._failure)})
                self._fail_open(_death(self._failure))
                return
            await asyncio.sleep(WATCH_SECONDS)

    def _watched(self, watcher: asyncio.Task[None]) -> None:
        """An engine that nobody watches any more must not serve either."""
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self._fail(error)
            self._fail_open(_death(error))

    def _look(self) -> None:
        """Note a decode loop that is dead, or that has a step to make and makes none for too long."""
        if self._decoder is None or self._failure is not None:
            return
        busy, steps = self._decoder.progress()
        now = self._loop.time()
        # A process that was stopped for a while (SIGSTOP) has not waited all that time for a step.
        passed, self._looked_at = min(now - self._looked_at, 4 * WATCH_SECONDS), now
        self._still = self._still + passed if busy and steps == self._steps else 0.0
        self._steps = steps
        failure = self._decoder.failure()
        if failure is None and self._still >= self._longest_step:
            failure = DeadlineExceeded(f"no decode step ended within {self._longest_step:g} s")
        if failure is not None:
            self._fail(failure)

    async def _run(self, seconds: float, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run work on the control thread, in order of the calls; work that does not end makes the engine dead.

        A cancelled caller does not stop the work: it would leave a model half changed. Nor does it stop the clock.
        """
        future = self._loop.run_in_executor(self._control, lambda: work(*args, **kwargs))
        late = DeadlineExceeded(f"the engine did not finish {work.__name__} within {seconds:g} s")
        deadline = self._loop.call_later(seconds, self._fail, late)

        def settled(_: asyncio.Future[_T]) -> None:
            deadline.cancel()
            if not future.cancelled() and isinstance(error := future.exception(), DeadlineExceeded):
                self._fail(error)  # the decode step that the work has waited for does not end

        future.add_done_callback(settled)
        try:
            await asyncio.wait([future], timeout=seconds)
            if not future.done():
                self._fail(late)
                raise late
            if future.cancelled():
                raise Unreachable("the engine was closed")
            return future.result()
        except DeadlineExceeded as error:
            raise _death(error) from error
        finally:
            if not future.done():
                future.add_done_callback(_log_failure)

    def _fail(self, cause: BaseException) -> None:
        """The engine is dead from now on; the first cause counts."""
        self._failure = self._failure or cause

    # --- control thread --------------------------------------------------------------------------------------------

    def _build(self) -> None:
        model = load_model(self._config)
        self._model = model
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._context = context_length(self._config, model)
        stop = stop_tokens(model)
        decoder: Decoder
        if choose_decode(self._config, model) == "slots":
            batch = SlotBatch(
                model,
                slots=self._config.engine.slots,
                context=self._context,
                stop_tokens=stop,
                generator=torch.Generator(model.device).manual_seed(self._seed),
            )
            decoder = SlotDecoder(batch, self._deliver, self._patience)
        else:
            decoder = ContinuousDecoder(
                model,
                engine=self._config.engine,
                context=self._context,
                stop=stop,
                seed=self._seed,
                deliver=self._deliver,
                loop=self._loop,
            )
        decoder.start()
        self._decoder = decoder

    def _deliver(self, outcomes: list[Outcome]) -> None:
        """Called by any thread of the decoder."""
        self._loop.call_soon_threadsafe(self._resolve, outcomes)

    def _tear_down(self) -> list[Outcome]:
        ended: list[Outcome] = []
        decoder = self._decoder
        if decoder is None:
            return ended
        try:
            with decoder.exclusive():
                ended = decoder.take(None)
        except Unreachable:
            logger.warning("engine closed after its death")
        for hold in self._holds.values():
            hold.close()
        self._holds.clear()
        decoder.stop()
        return ended

    def _hold(self, decoder: Decoder, why: Literal["pause", "sleep"]) -> None:
        if why not in self._holds:
            stack = ExitStack()
            stack.enter_context(decoder.exclusive())
            self._holds[why] = stack

    def _unhold(self, why: Literal["pause", "sleep"]) -> None:
        stack = self._holds.pop(why, None)
        if stack is not None:
            stack.close()

    def _swap(self, decoder: Decoder, pair: Pair, tensors: Mapping[str, torch.Tensor]) -> None:
        if pair == self._pair:
            return
        if pair < self._pair or pair[1] < self._pair[1]:
            raise WeightsError(f"version {pair} of the weights is older than {self._pair}, which is in force")
        pairs = match_weights(self._model, tensors)
        with decoder.exclusive():
            try:
                copy_weights(pairs)
            except BaseException as error:
                self._fail(error)
                raise
            decoder.swapped(pair[1])
            self._pair = pair

    def _sleep(self, decoder: Decoder) -> None:
        if "sleep" in self._holds:
            return
        self._hold(decoder, "sleep")
        try:
            decoder.release()
        except BaseException:
            self._unhold("sleep")
            raise
        self._home = self._model.device
        self._model.to("cpu")

    def _wake(self, decoder: Decoder) -> None:
        if "sleep" in self._holds:
            self._model.to(self._home)
            decoder.restore()
            self._unhold("sleep")


def _death(failure: BaseException) -> Unreachable:
    return Unreachable(f"the engine died: {failure}")


def _log_failure(future: asyncio.Future[Any]) -> None:
    """Read the result of work that nobody waits for any more."""
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("control of the engine failed after its caller left", exc_info=error)
