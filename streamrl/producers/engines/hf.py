"""The Hugging Face engine: any causal language model, in this process.

Three threads: the event loop's owns requests and futures, the decode thread model and cache; the control thread asks
the decode thread to stand still, and then loads, swaps or frees weights. Requests and results cross in batches.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.engine import Completion, EngineLoad, Generator, Request, RequestLimits
from streamrl.errors import DeadlineExceeded, Unreachable
from streamrl.images.vision import Vision, vision_of
from streamrl.producers.engines.model import affordable_slots, check_decodable, context_length, load_model, stop_tokens
from streamrl.producers.engines.slots import Job, SlotBatch, SlotDecoder
from streamrl.producers.stopping import StopTexts
from streamrl.producers.tokenizer import Tokenizer
from streamrl.weight_sync.tensors import Version

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
WATCH_SECONDS = 0.25
LOAD_SECONDS = 1800.0


class HfEngine(Generator):
    """An engine on transformers; replicas need different seeds. `Unreachable`: it is not started, closed, or dead.

    A dead one stays dead: the supervisor starts its process again. A control or a decode step that does not end within
    a deadline is its death, also when its caller has left.
    """

    def __init__(self, config: RunConfig, seed: int) -> None:
        self._config, self._seed, self._patience = config, seed, config.weights.deadline
        # A step hangs when it takes half the time of a whole response; it is then found before it costs a response.
        self._longest_step = min(config.weights.deadline, config.lease.max_hold / 2)
        self._steps = 0
        self._still = self._looked_at = 0.0
        self._tokenizer: Tokenizer | None = None
        self._decoder: SlotDecoder | None = None
        self.limits = RequestLimits(0, 0)
        self._vision: Vision | None = None
        self._failure: BaseException | None = None
        self._started = self._closed = False
        self._tickets = itertools.count(1)
        self._open: dict[int, asyncio.Future[Job]] = {}
        self._arrived: list[Job] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-control")
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started = True
        await self._run(LOAD_SECONDS, self._build)
        self._looked_at = self._loop.time()
        self._watcher = asyncio.create_task(self._watch(), name="engine-watch")

    async def close(self) -> None:
        """Abort what is in flight: `generate` returns with `finish="abort"`. Works on a dead engine; repeatable."""
        if self._closed:
            return
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if isinstance(self._failure, DeadlineExceeded):
            # a hanging thread cannot be stopped; it ends with the process
            if self._decoder is not None:
                self._decoder.abandon()
        elif self._started:
            self._flush()
            try:
                # on the control thread, so after a start that was cancelled half-way
                self._resolve(await self._run(self._patience, self._tear_down))
            except Unreachable:
                logger.exception("engine does not stop")
        self._fail_open(Unreachable("the engine was closed"))
        self._thread.shutdown(wait=False, cancel_futures=True)

    @override
    async def generate(self, request: Request) -> Completion:
        stop = await self._stop_texts(request) if request.stop else None
        decoder = self._serving()
        limit = self.limits.check(request)
        ticket = next(self._tickets)
        future = self._open[ticket] = self._loop.create_future()
        if not self._arrived:
            self._loop.call_soon(self._flush)
        prompt = tuple(request.tokens.tolist())
        asked = request if request.cuts or request.min_tokens or request.seed is not None else None
        self._arrived.append(Job(ticket, prompt, limit, request.temperature, asked, stop, request.images))
        start = self._loop.time()
        try:
            outcome = await future
        except BaseException as error:
            if not isinstance(error, Unreachable):
                self._flush()
                decoder.discard(ticket)
            raise
        finally:
            del self._open[ticket]
        return Completion(
            tokens=np.asarray(outcome.tokens, dtype=np.int32),
            logprobs=np.asarray(outcome.logprobs, dtype=np.float32),
            runs=outcome.runs,
            finish=outcome.finish,
            seconds=self._loop.time() - start,
        )

    async def apply(self, version: Version) -> None:
        """Replace all weights between two decode steps, also while asleep, whole or not at all (`WeightsError`).

        Requests in flight keep their keys and values. Cancelling does not stop an update that has begun.
        """
        await self._run(self._patience, self._serving().apply, version)

    async def sleep(self, level: Literal[0, 1] = 1) -> None:
        """Stop decoding until `wake`; level 1 frees keys and values, which are computed again, and moves weights."""
        await self._run(self._patience, self._serving().sleep, level)

    async def wake(self) -> None:
        await self._run(self._patience, self._serving().wake)

    @override
    def load(self) -> EngineLoad:
        if self._decoder is None:
            return EngineLoad(0, 0, 0, 0.0, 0, self._config.engine.slots)
        return self._decoder.load(len(self._arrived))

    def figures(self) -> dict[str, int]:
        """How many images were made pixels: each once, however many responses and turns show it."""
        return {} if self._vision is None else {"images_processed": self._vision.processed}

    @override
    async def health(self) -> None:
        self._look()
        self._serving()

    # --- event loop's thread ---------------------------------------------------------------------------------------

    def _serving(self) -> SlotDecoder:
        if self._decoder is None or self._closed:
            raise Unreachable("the engine is closed" if self._closed else "the engine has not been started")
        failure = self._failure or self._decoder.failure
        if failure is not None:
            raise _death(failure) from failure
        return self._decoder

    async def _stop_texts(self, request: Request) -> StopTexts:
        if self._tokenizer is None:  # few runs need one here
            self._tokenizer = await asyncio.to_thread(Tokenizer.load, self._config.model)
        return StopTexts(request.stop, self._tokenizer.decode, request.min_tokens)

    def _flush(self) -> None:
        if self._arrived and self._decoder is not None:
            jobs, self._arrived = self._arrived, []
            self._decoder.submit(jobs)

    def _resolve(self, jobs: list[Job]) -> None:
        for job in jobs:
            future = self._open.get(job.ticket)
            if future is not None and not future.done():
                future.set_result(job)

    def _fail_open(self, error: Exception) -> None:
        for future in list(self._open.values()):
            if not future.done():
                future.set_exception(error)

    async def _watch(self) -> None:
        while True:
            self._look()
            if self._failure is not None:
                logger.error("engine died", extra={"cause": repr(self._failure)})
                self._fail_open(_death(self._failure))
                return
            await asyncio.sleep(WATCH_SECONDS)

    def _look(self) -> None:
        """Record a decode loop that is dead, or that has a step to make and makes none for too long."""
        if self._decoder is None or self._failure is not None:
            return
        busy, steps = self._decoder.progress()
        now = self._loop.time()
        # A process that was stopped (SIGSTOP) did not really wait for the step all that time.
        passed, self._looked_at = min(now - self._looked_at, 4 * WATCH_SECONDS), now
        self._still = self._still + passed if busy and steps == self._steps else 0.0
        self._steps = steps
        self._failure = self._decoder.failure
        if self._failure is None and self._still >= self._longest_step:
            self._failure = DeadlineExceeded(f"no decode step ended within {self._longest_step:g} s")

    async def _run(self, seconds: float, work: Callable[..., _T], *args: Any) -> _T:
        """On the control thread. A cancelled caller stops neither the work (a model half changed) nor its deadline."""
        future = self._loop.run_in_executor(self._thread, lambda: work(*args))
        late = DeadlineExceeded(f"the engine did not finish {work.__name__} within {seconds:g} s")

        async def result() -> _T:
            await asyncio.wait([future], timeout=seconds)
            try:
                if not future.done():
                    raise late
                if future.cancelled():
                    raise Unreachable("the engine was closed")
                return future.result()
            except DeadlineExceeded as error:  # also of the decode step that the work waits for
                self._failure = self._failure or error
                raise _death(error) from error

        task = self._loop.create_task(result())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(partial(_log_failure, work.__name__))
            raise

    # --- control thread --------------------------------------------------------------------------------------------

    def _build(self) -> None:
        model = load_model(self._config)
        context = context_length(self._config, model)
        self.limits = RequestLimits(context, int(model.get_input_embeddings().num_embeddings))
        stop = stop_tokens(model.generation_config, model.config)
        self._vision = vision_of(self._config.model)
        check_decodable(self._config, model, self._vision)
        batch = SlotBatch(
            model,
            vision=self._vision,
            slots=affordable_slots(self._config, model),
            context=context,
            stop_tokens=stop,
            generator=torch.Generator(model.device).manual_seed(self._seed),
        )
        self._decoder = SlotDecoder(batch, self._deliver, self._patience)
        self._decoder.start()

    def _deliver(self, jobs: list[Job]) -> None:
        self._loop.call_soon_threadsafe(self._resolve, jobs)

    def _tear_down(self) -> list[Job]:
        ended: list[Job] = []
        if self._decoder is not None:
            try:
                ended = self._decoder.close()
            except Unreachable:
                logger.warning("engine closed after its death")
            self._decoder.stop()
        return ended


def _log_failure(control: str, task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("a control of the engine failed", extra={"control": control, "error": str(error)})


def _death(failure: BaseException) -> Unreachable:
    return Unreachable(f"the engine died: {failure}")
