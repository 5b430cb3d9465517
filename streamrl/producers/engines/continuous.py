"""Transformers' continuous batching as a decode loop: paged keys and values, for models of any size.

The manager has a public interface for requests and pauses, but none for a weight swap, which needs to know where each
request stands and to keep new requests from blocks that older weights wrote. The private members used for that are in
`PRIVATE_MEMBERS`; `tests/producers/test_engine_private_api.py` says which one has changed when transformers is updated.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus
from typing_extensions import override

from streamrl.config import EngineConfig
from streamrl.engine import Finish
from streamrl.errors import DeadlineExceeded, Refused, Unreachable
from streamrl.producers.engines.decoder import (
    Counts,
    Decoder,
    Deliver,
    Job,
    JobOutcome,
    JobProgress,
    Spans,
    Tell,
)
from streamrl.producers.engines.model import cache_bytes_per_token

PAGE_TOKENS: Final = 32
_GREEDY: Final = 1e-4
"""Temperature of a greedy request: transformers divides by it, and has no greedy mode for a single request."""
STOP_SECONDS: Final = 30.0
LOOP_SECONDS: Final = 30.0
_HARD_STOP: Final = BackgroundThreadStatus.HARD_STOP
PRIVATE_MEMBERS: Final = (
    "batch_processor.scheduler.active_requests",
    "batch_processor.scheduler.waiting_requests",
    "batch_processor.scheduler.waiting_requests_order",
    "batch_processor.scheduler.add_waiting_request",
    "batch_processor.scheduler.finish_request",
    "batch_processor.cache.free_blocks",
    "batch_processor.cache.evict_cached_blocks",
    "batch_processor.cache.mark_complete_blocks",
    "batch_processor.cache.cache_allocators",
    "background_thread_status.fatal_error",
    "background_thread_status.request_stop",
    "output_router.result_handlers",
    "current_batch",
)


@dataclass(slots=True, eq=False)
class _Flight:
    job: Job
    spans: Spans
    told: int = 0


class ContinuousDecoder(Decoder):
    """Decode loop on a `ContinuousBatchingManager`.

    `engine.slots` requests run at the same time, over `engine.kv_cache` bytes of paged cache. `seed` is that of torch's
    global generator, which the manager samples with; `loop` is the event loop in which `submit` is called.
    """

    def __init__(
        self,
        model: Any,
        *,
        engine: EngineConfig,
        context: int,
        stop: frozenset[int],
        seed: int,
        deliver: Deliver,
        tell: Tell,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._model = model
        self._engine = engine
        self._context = context
        self._stop_tokens = stop
        self._seeds = itertools.count(seed)
        self._deliver = deliver
        self._tell = tell
        self._loop = loop
        self._lock = threading.Lock()
        self._manager: Any = None
        self._stopped = False
        self._held: list[Job] = []
        self._flights: dict[str, _Flight] = {}
        self._stale: set[str] = set()
        self._depth = 0
        self._pause: AbstractContextManager[None] | None = None
        self._version = 0
        self._tokens = 0
        self._preemptions = 0
        self._pages = 1
        self._busy = 0.0
        self._busy_since: float | None = None

    @override
    def start(self) -> None:
        self._manager = self._make_manager()

    @override
    def stop(self) -> None:
        self._stopped = True
        if self._manager is not None:
            self._manager.stop(block=True, timeout=STOP_SECONDS, hard_stop=True)
            self._manager = None

    @override
    def abandon(self) -> None:
        # Does not wait for the step to end. The manager's thread would keep the process alive.
        self._stopped = True
        if self._manager is not None:
            self._manager.output_router.result_handlers.clear()
            self._manager.background_thread_status.request_stop(_HARD_STOP, 0)

    @override
    def submit(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            if self._manager is None:
                self._held.extend(jobs)
                return
            for job in jobs:
                self._submit(job)

    @override
    def discard(self, ticket: int) -> None:
        with self._lock:
            self._held = [job for job in self._held if job.ticket != ticket]
            if self._land(str(ticket)) is not None:
                self._manager.cancel_request(str(ticket))

    @override
    @contextmanager
    def exclusive(self) -> Iterator[None]:
        if self._depth == 0:
            self._park()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._unpark()

    @override
    def take(self, tickets: Collection[int] | None) -> list[JobOutcome]:
        # The manager reports nothing about requests that it cancels.
        with self._lock:
            ended = [JobOutcome(job.ticket, [], [], [], "abort") for job in self._held if _named(job, tickets)]
            self._held = [job for job in self._held if not _named(job, tickets)]
            for name, flight in list(self._flights.items()):
                if not _named(flight.job, tickets):
                    continue
                state = self._state(name)
                self._manager.cancel_request(name)
                self._land(name)
                tokens, logprobs = _partial(state)
                self._tokens += len(tokens)
                runs = flight.spans.runs(len(tokens))
                ended.append(JobOutcome(flight.job.ticket, tokens, logprobs, runs, "abort"))
        return ended

    @override
    def swapped(self, version: int) -> None:
        # Record where every request stands, and forget the blocks that old weights wrote.
        with self._lock:
            self._version = version
            for name, flight in self._flights.items():
                flight.spans.swap(len(_partial(self._state(name))[0]), version)
            if self._manager is None:
                return
            processor = self._manager.batch_processor
            self._stale = set(processor.scheduler.active_requests)
            processor.cache.evict_cached_blocks()
            for allocator in processor.cache.cache_allocators.values():
                allocator.ledger.hash_to_block.clear()
                allocator.ledger.block_to_hash.clear()

    @override
    def recompute(self) -> None:
        # Requests in flight are put back, before the waiting ones, as prompts that end with what they have sampled.
        # The manager does the same with a request that it evicts for want of memory.
        with self._lock:
            if self._manager is None:
                return
            scheduler, cache = self._manager.batch_processor.scheduler, self._manager.batch_processor.cache
            states = list(scheduler.active_requests.values())
            for state in states:
                cache.free_blocks(state.request_id, no_cache=True)
                again = state.create_equivalent_initial_request()
                scheduler.finish_request(state.request_id)
                scheduler.add_waiting_request(again)
            scheduler.waiting_requests_order.rotate(len(states))
            self._stale.clear()

    @override
    def release(self) -> None:
        with self._lock:
            if self._flights:
                raise Refused(
                    f"{len(self._flights)} requests are being decoded: their keys and values would be lost",
                    "abort them or wait for their end, then sleep",
                )
            manager, self._manager = self._manager, None
        self._unpark()
        manager.stop(block=True, timeout=STOP_SECONDS, hard_stop=True)

    @override
    def restore(self) -> None:
        manager = self._make_manager()
        with self._lock:
            self._manager = manager
            held, self._held = self._held, []
        self._loop.call_soon_threadsafe(self.submit, held)
        self._park()

    @override
    def counts(self) -> Counts:
        # Tokens are those of ended requests; busy seconds those with a request in flight.
        since = self._busy_since
        busy = self._busy + (time.perf_counter() - since if since is not None else 0.0)
        running = min(len(self._flights), self._engine.slots)
        waiting = len(self._flights) - running + len(self._held)
        return Counts(running, waiting, self._tokens, busy, self._cache_use(), self._preemptions)

    def _cache_use(self) -> float:
        """Share of the pages that requests hold; a page kept only for later prompts counts as free."""
        processor = getattr(self._manager, "batch_processor", None)
        if processor is None:
            return 0.0
        states = tuple(processor.scheduler.active_requests.values())
        return min(1.0, float(sum(-(-state.position_offset // PAGE_TOKENS) for state in states)) / self._pages)

    @override
    def progress(self) -> tuple[bool, int]:
        manager = self._manager
        if manager is None or self._depth:
            return False, 0
        # the manager's thread makes the counter when it begins
        return bool(self._flights), getattr(manager, "current_batch", 0)

    @override
    def failure(self) -> BaseException | None:
        manager = self._manager
        if manager is None or self._stopped:
            return None
        error: BaseException | None = manager.background_thread_status.fatal_error
        if error is None and not manager.is_running():
            error = RuntimeError("the thread of continuous batching ended")
        return error

    def _make_manager(self) -> Any:
        whole = -(-self._context // PAGE_TOKENS) + 1
        affordable = self._engine.kv_cache // (cache_bytes_per_token(self._model) * PAGE_TOKENS)
        self._pages = max(whole, min(whole * self._engine.slots, affordable))
        manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=True,
                top_k=0,
                top_p=1.0,
                # any value but 1 makes transformers keep the warper, which then applies each request's own temperature
                temperature=0.5,
                eos_token_id=sorted(self._stop_tokens) or -1,
                pad_token_id=0,
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                # without these two it takes most of the machine's memory
                num_blocks=self._pages,
                max_batch_tokens=max(256, self._engine.slots),
                max_requests_per_batch=self._engine.slots,
                # a step in flight during a swap would be sampled by the old weights and counted as the new version
                use_async_batching=False,
                return_logprobs=True,
                per_request_processors=True,
                seed=next(self._seeds),
            ),
        )
        manager.warmup()
        self._refuse_stale_blocks(manager.batch_processor.cache)
        self._count_preemptions(manager.batch_processor.scheduler)
        manager.start()
        return manager

    def _refuse_stale_blocks(self, cache: Any) -> None:
        """Keep requests that began under older weights from offering their blocks to newer ones."""
        mark = cache.mark_complete_blocks

        def mark_complete_blocks(state: Any, complete_blocks: dict[str, int]) -> None:
            if state.request_id not in self._stale:
                mark(state, complete_blocks)

        cache.mark_complete_blocks = mark_complete_blocks

    def _count_preemptions(self, scheduler: Any) -> None:
        """Count requests that the manager evicts, but not those that `recompute` puts back while the loop is held."""
        add = scheduler.add_waiting_request

        def add_waiting_request(state: Any) -> None:
            if state._true_initial_tokens and not self._depth:  # noqa: SLF001
                self._preemptions += 1
            add(state)

        scheduler.add_waiting_request = add_waiting_request

    def _submit(self, job: Job) -> None:
        name = str(job.ticket)
        self._flights[name] = _Flight(job, Spans(self._version))
        if self._busy_since is None:
            self._busy_since = time.perf_counter()
        self._manager.register_result_handler(name, self._finished)
        accepted = self._manager.add_request(
            list(job.prompt),
            name,
            max_new_tokens=job.limit,
            streaming=job.streams,
            temperature=job.temperature or _GREEDY,
        )
        if accepted is None:
            self._land(name)
            error = Unreachable("the decode loop takes no more requests")
            self._deliver([JobOutcome(job.ticket, [], [], [], "abort", error)])

    def _finished(self, output: Any) -> None:
        """Called in the event loop: once when a request ends, and for each step of a request with a listener."""
        if not output.is_finished():
            self._went_on(output)
            return
        with self._lock:
            flight = self._land(output.request_id)
        if flight is None:
            return
        tokens, logprobs = output.generated_tokens, output.logprobs
        self._tokens += len(tokens)
        error = Unreachable(f"the engine could not decode: {output.error}") if output.error is not None else None
        finish: Finish = "stop" if tokens and tokens[-1] in self._stop_tokens else "length"
        runs = flight.spans.runs(len(tokens))
        self._deliver([JobOutcome(flight.job.ticket, tokens, logprobs, runs, finish, error)])

    def _went_on(self, output: Any) -> None:
        with self._lock:
            flight = self._flights.get(output.request_id)
        if flight is None:
            return
        start, flight.told = flight.told, len(output.generated_tokens)
        if start < flight.told:
            self._tell([JobProgress(flight.job.ticket, output.generated_tokens[start:], output.logprobs[start:])])

    def _land(self, name: str) -> _Flight | None:
        flight = self._flights.pop(name, None)
        self._stale.discard(name)
        if flight is not None:
            self._manager.output_router.result_handlers.pop(name, None)
        if not self._flights and self._busy_since is not None:
            self._busy += time.perf_counter() - self._busy_since
            self._busy_since = None
        return flight

    def _state(self, name: str) -> Any:
        if self._manager is None:
            return None
        scheduler = self._manager.batch_processor.scheduler
        return scheduler.active_requests.get(name) or scheduler.waiting_requests.get(name)

    def _park(self) -> None:
        if self._manager is None:
            return
        self._pause = self._manager.pause()
        try:
            self._pause.__enter__()
        except RuntimeError as error:
            self._pause = None
            raise Unreachable(f"the decode loop died: {self.failure()!r}") from error
        # results sent before the pause may still be queued; without them an ended request looks unscheduled
        arrived = threading.Event()
        self._loop.call_soon_threadsafe(arrived.set)
        if not arrived.wait(LOOP_SECONDS):
            self._unpark()
            raise DeadlineExceeded(f"the event loop is blocked for more than {LOOP_SECONDS:g} s")

    def _unpark(self) -> None:
        if self._pause is not None:
            pause, self._pause = self._pause, None
            pause.__exit__(None, None, None)


def _named(job: Job, tickets: Collection[int] | None) -> bool:
    return tickets is None or job.ticket in tickets


def _partial(state: Any) -> tuple[list[int], list[float]]:
    if state is None:
        return [], []
    output = state.to_generation_output()
    return output.generated_tokens, output.logprobs
