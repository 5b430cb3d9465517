"""Static-slot decoding of an unmodified Hugging Face causal language model.

Up to `slots` sequences are decoded together, one token each per step. Their keys and values stay in their slot, the
token at position p in row p; a step runs over the first slots, as many as needed, and attends over the longest of them
rounded up to 16. What a free slot in between computes is not read. Prompts that come together and are equal are
computed once. A sliding window is a mask. `SlotBatch` has no threads; `SlotDecoder` drives it.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from streamrl.engine import EngineLoad, Finish, Request, RequestImage, Runs
from streamrl.errors import DeadlineExceeded, Unreachable, WeightsError
from streamrl.images.vision import Pixels, Vision
from streamrl.producers.engines import weights
from streamrl.producers.engines.drawing import sample
from streamrl.producers.stopping import StopTexts
from streamrl.weight_sync.manifest import Pair
from streamrl.weight_sync.tensors import Version

logger = logging.getLogger(__name__)
GRANULE = 16
PREFILL_TOKENS = 4096
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


# ---- what comes in and goes out


@dataclass(slots=True, eq=False)
class Job:
    """A checked request, and what was sampled for it. `request`: for what else it asks of sampling, None: nothing."""

    ticket: int
    prompt: tuple[int, ...]
    limit: int
    temperature: float
    request: Request | None = None
    stop: StopTexts | None = None
    images: tuple[RequestImage, ...] = ()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish = "abort"
    generator: torch.Generator | None = None
    _runs: Runs = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def runs(self) -> Runs:
        return [run for run in self._runs if run[0] < len(self.tokens)]

    def swap(self, version: int) -> None:
        """Later tokens belong to `version`; swaps without a token between are one."""
        if self._runs and self._runs[-1][0] == len(self.tokens):
            self._runs.pop()
        if not self._runs or self._runs[-1][1] != version:
            self._runs.append((len(self.tokens), version))


# ---- keys and values


def round_up(length: int) -> int:
    """To the granule of attention: few distinct shapes, little wasted work."""
    return -(-length // GRANULE) * GRANULE


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: tensors only, all logic is in `SlotCache`. Sizes are learned from the first forward pass."""

    is_sliding = False
    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.capacity = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._grown(self.keys, key_states)
        self.values = self._grown(self.values, value_states)
        self.is_initialized = True

    def _grown(self, old: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        new = like.new_zeros(self.slots, like.shape[1], self.capacity, like.shape[3])
        if old is not None:
            new[:, :, : old.shape[2]] = old
        return new

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("SlotCache.update knows the slots")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # prefill attends over itself alone, and decoding brings its own mask

    def get_seq_length(self) -> int:
        return 0  # positions are always given, and a prefill begins at 0

    def get_max_length(self) -> int:
        return int(self.capacity)


class SlotCache(Cache):  # type: ignore[misc]
    """Per layer (slots, key-value heads, capacity, head size); capacity doubles with the longest, up to `context`."""

    def __init__(self, layers: int, slots: int, context: int) -> None:
        super().__init__(layers=[SlotLayer(slots) for _ in range(layers)])
        self._limit = round_up(context)
        self._capacity = 0
        self._sources: torch.Tensor | None = None
        self._slots: torch.Tensor | None = None
        self._rows: dict[int, torch.Tensor] = {}
        self._count = self._span = 0

    def reserve(self, length: int) -> None:
        if length <= self._capacity:
            return
        self._capacity = min(self._limit, max(round_up(length), 2 * self._capacity, 4 * GRANULE))
        for layer in self.layers:
            layer.capacity = self._capacity
            if layer.is_initialized:
                layer.lazy_initialization(layer.keys, layer.values)

    def prefill(self, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """Announce a forward pass over whole prompts: batch row `sources[i]` is copied into slot `slots[i]`."""
        self._sources, self._slots = sources, slots

    def decode(self, positions: torch.Tensor, span: int) -> None:
        """Announce a pass of one token in each of the first slots, at `positions`; attention sees rows 0 to `span`."""
        self._sources, self._slots = None, positions
        self._rows.clear()
        self._count, self._span = len(positions), span

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        if self._sources is not None:
            length = key_states.shape[2]
            layer.keys[self._slots, :, :length] = key_states[self._sources]
            layer.values[self._slots, :, :length] = value_states[self._sources]
            return key_states, value_states
        rows = self._flat_rows(key_states.shape[1])
        # a tenth faster for the whole step than assignment to indices
        for cached, new in ((layer.keys, key_states), (layer.values, value_states)):
            cached.view(-1, new.shape[3]).index_copy_(0, rows, new.reshape(-1, new.shape[3]))
        return layer.keys[: self._count, :, : self._span], layer.values[: self._count, :, : self._span]

    def _flat_rows(self, heads: int) -> torch.Tensor:
        """Rows of this step in the view (slots x heads x capacity, head size); the same for all layers."""
        rows = self._rows.get(heads)
        if rows is None:
            assert self._slots is not None
            device = self._slots.device
            first = torch.arange(self._count * heads, device=device).view(-1, heads) * self._capacity
            rows = self._rows[heads] = (first + self._slots[:, None]).view(-1)
        return rows

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        for layer in self.layers:
            layer.keys[targets, :, :length] = layer.keys[sources, :, :length]
            layer.values[targets, :, :length] = layer.values[sources, :, :length]

    def free(self) -> None:
        self._capacity = 0
        for layer in self.layers:
            layer.keys = layer.values = None
            layer.is_initialized = False


# ---- the sequences


def attention_kinds(config: Any) -> set[str]:
    """Kinds of a model's layers, by the names of transformers; a model that lists none has one kind."""
    kinds = getattr(config, "layer_types", None)
    return set(kinds or [SLIDING if getattr(config, "sliding_window", None) else FULL])


class SlotBatch:
    """`vision` is the image side of the model: nothing samples a token that stands for an image."""

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        context: int,
        stop_tokens: frozenset[int],
        generator: torch.Generator,
        vision: Vision | None = None,
    ) -> None:
        self.slots, self.context = slots, context
        self.version = self.tokens_sampled = 0
        self.model = model
        self._dtype: torch.dtype = model.dtype
        self._stop = stop_tokens
        self._generator = generator
        self._keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        config = model.config.get_text_config()
        self._kinds = attention_kinds(config)
        self._window: int | None = config.sliding_window if SLIDING in self._kinds else None
        self._cache = SlotCache(config.num_hidden_layers, slots, context)
        self._rows: list[Job | None] = [None] * slots
        self._high = 0
        # `_shift`: how far rotary positions are off the places of tokens, behind images that number rows and columns
        self._token, self._position, self._taken, self._shift = torch.zeros(
            4, slots, dtype=torch.long, device=model.device
        )
        self._vision = vision
        self._axes = 1 if vision is None else vision.axes
        self._forbidden = None if vision is None else torch.tensor(vision.forbidden, device=model.device)
        self._ruler = torch.arange(round_up(context), device=model.device)

    @property
    def active(self) -> int:
        return self.slots - self._rows.count(None)

    @torch.inference_mode()
    def admit(self, jobs: Sequence[Job]) -> list[Job]:
        """Compute what at most `slots - active` jobs have, sample their next tokens; return jobs that ended."""
        free = [slot for slot, row in enumerate(self._rows) if row is None]
        groups: dict[tuple[tuple[int, ...], tuple[str, ...]], list[int]] = {}
        for slot, job in zip(free, jobs, strict=False):
            self._rows[slot] = job
            job.swap(self.version)
            if job.generator is None and job.request is not None and job.request.seed is not None:
                job.generator = torch.Generator(self._token.device).manual_seed(job.request.seed)
            same = ((*job.prompt, *job.tokens), tuple(image.sha256 for image in job.images))
            groups.setdefault(same, []).append(slot)
        ended: list[Job] = []
        for part in _parts(sorted(groups.items(), key=lambda group: len(group[0][0]))):
            ended += self._prefill([ids for (ids, _), _ in part], [slots for _, slots in part])
        return ended

    def _prefill(self, prompts: list[tuple[int, ...]], groups: list[list[int]]) -> list[Job]:
        """One pass over distinct prompts, the longest last, padded on the right: the causal mask keeps that out."""
        device = self._token.device
        longest = len(prompts[-1])
        inputs = torch.tensor([prompt + (0,) * (longest - len(prompt)) for prompt in prompts], device=device)
        flat = [slot for group in groups for slot in group]
        slots = torch.tensor(flat, device=device)
        sources = torch.tensor([row for row, group in enumerate(groups) for _ in group], device=device)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        # the head runs only where some prompt of the batch ends; each row then picks its own end
        ends = torch.unique(last) if self._keep else self._ruler[:longest]
        self._cache.reserve(longest)
        self._cache.prefill(sources, slots)
        places, shift, pixels = self._seen(prompts, [self._rows[group[0]] for group in groups])
        output = self.model(
            input_ids=inputs,
            position_ids=places,
            **pixels,
            past_key_values=self._cache,
            use_cache=True,
            **({"logits_to_keep": ends} if self._keep else {}),
        )
        logits = output.logits[torch.arange(len(prompts), device=device), torch.searchsorted(ends, last)]
        tokens, logprobs = self._draw(logits[sources], flat)
        self._token[slots] = tokens
        self._position[slots] = last[sources] + 1
        self._shift[slots] = shift[sources]
        self._taken[slots] = 1
        self._high = max(self._high, *(slot + 1 for slot in flat))
        return self._record(flat, tokens.tolist(), logprobs.tolist())

    def _seen(
        self, prompts: list[tuple[int, ...]], jobs: Sequence[Job | None]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Rotary positions of prompts, how far they are off behind each, and the pixels of their images."""
        places = self._ruler[: len(prompts[-1])].expand(len(prompts), -1)
        shift = torch.zeros(len(prompts), dtype=torch.long, device=places.device)
        if self._vision is None:
            return places, shift, {}
        if self._axes > 1:
            places = places.repeat(self._axes, 1, 1)
        shown: list[Pixels] = []
        for row, (ids, job) in enumerate(zip(prompts, jobs, strict=True)):
            if job is not None and job.images:
                pixels = [self._vision.pixels(image.sha256, image.data) for image in job.images]
                found, behind = self._vision.positions(ids, pixels)
                if self._axes > 1:
                    places[:, row, : len(ids)] = torch.from_numpy(found)
                shift[row] = behind - len(ids)
                shown += pixels
        joined = self._vision.joined(shown) if shown else {}
        return places, shift, {key: torch.from_numpy(array).to(places.device) for key, array in joined.items()}

    @property
    def cache_use(self) -> float:
        # from any thread: a row that has just gone is None, and one that just moved counts twice for a moment
        used = sum(row.length for row in tuple(self._rows) if row is not None)
        return min(1.0, used / (self.slots * self.context))

    @torch.inference_mode()
    def step(self) -> list[Job]:
        self._compact()
        count = self._high
        position = self._position[:count]
        longest = max(row.length for _, row in self._active())
        span = round_up(longest)
        self._cache.reserve(longest)
        self._cache.decode(position, span)
        output = self.model(
            input_ids=self._token[:count, None],
            position_ids=self._placed(position + self._shift[:count]),
            attention_mask=self._mask(position, span),
            past_key_values=self._cache,
            use_cache=True,
        )
        tokens, logprobs = self._draw(output.logits[:, -1], range(count))
        self._token[:count] = tokens
        # a free slot stays at position 0, so that it always has one row to attend to
        position += self._taken[:count]
        return self._record(range(count), tokens.tolist(), logprobs.tolist())

    def _placed(self, position: torch.Tensor) -> torch.Tensor:
        return position[:, None] if self._axes == 1 else position[None, :, None].expand(self._axes, -1, -1)

    def _mask(self, position: torch.Tensor, span: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """What one token at `position` in each slot sees of rows 0 to `span`; by kind of layer where they differ."""
        place = position[:, None, None, None]
        full = torch.zeros(len(position), 1, 1, span, dtype=self._dtype, device=position.device)
        full.masked_fill_(self._ruler[:span] > place, -math.inf)
        if self._window is None:
            return full
        sliding = full.masked_fill(self._ruler[:span] <= place - self._window, -math.inf)
        return {FULL: full, SLIDING: sliding} if FULL in self._kinds else sliding

    def take(self, tickets: Collection[int] | None = None) -> list[Job]:
        ending = [(slot, row) for slot, row in self._active() if tickets is None or row.ticket in tickets]
        self._free([slot for slot, _ in ending])
        return [row for _, row in ending]

    def swapped(self, version: int) -> None:
        self.version = version
        for _, row in self._active():
            row.swap(version)

    def release(self) -> None:
        self._cache.free()

    def _active(self) -> Iterator[tuple[int, Job]]:
        return ((slot, row) for slot, row in enumerate(self._rows) if row is not None)

    def _draw(self, logits: torch.Tensor, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = {at: row for at, slot in enumerate(slots) if (row := self._rows[slot]) is not None}
        if self._forbidden is not None:
            logits = logits.index_fill(-1, self._forbidden, -math.inf)
        if all(row.request is None and row.temperature == 1.0 for row in rows.values()):
            return sample(logits, None, self._generator)  # the usual case, and a division saved
        special = {at: row.request for at, row in rows.items() if row.request is not None}
        early = [at for at, asked in special.items() if len(rows[at].tokens) < asked.min_tokens]
        if early and self._stop:
            logits = logits.clone()
            logits[torch.tensor(early)[:, None], torch.tensor(list(self._stop))] = -math.inf
        heat = [rows[at].temperature if at in rows else 1.0 for at in range(len(slots))]
        return sample(
            logits,
            torch.tensor(heat, device=logits.device),
            self._generator,
            cut={at: asked for at, asked in special.items() if asked.cuts},
            own={at: row.generator for at, row in rows.items() if row.generator is not None},
        )

    def _record(self, slots: Sequence[int], tokens: list[int], logprobs: list[float]) -> list[Job]:
        ended: dict[int, Job] = {}
        total = 0.0
        for slot, token, logprob in zip(slots, tokens, logprobs, strict=True):
            row = self._rows[slot]
            if row is None:
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            total += logprob
            self.tokens_sampled += 1
            stopped = token in self._stop or (row.stop is not None and row.stop.ends(row.tokens))
            if stopped or len(row.tokens) == row.limit:
                row.finish = "stop" if stopped else "length"
                ended[slot] = row
        if not math.isfinite(total):
            raise WeightsError(f"version {self.version} of the weights gives log-probabilities that are not finite")
        self._free(list(ended))
        return list(ended.values())

    def _free(self, slots: list[int]) -> None:
        if not slots:
            return
        for slot in slots:
            self._rows[slot] = None
        for values in (self._position, self._taken, self._shift):
            values[slots] = 0
        while self._high and self._rows[self._high - 1] is None:
            self._high -= 1

    def _compact(self) -> None:
        """Move the last sequences into gaps when an eighth of the range would be computed in vain."""
        active = self.active
        if 8 * (self._high - active) < self._high:
            return
        sources = [slot for slot in range(active, self._high) if self._rows[slot] is not None]
        targets = [slot for slot in range(active) if self._rows[slot] is None]
        self._cache.move(sources, targets, max(row.length for _, row in self._active()))
        for values in (self._token, self._position, self._taken, self._shift):
            values[targets] = values[sources]
        for source, target in zip(sources, targets, strict=True):
            self._rows[target], self._rows[source] = self._rows[source], None
        for values in (self._position, self._taken, self._shift):
            values[active : self._high] = 0
        self._high = active


_Group: TypeAlias = tuple[tuple[tuple[int, ...], tuple[str, ...]], list[int]]
"""Ids and images of a prompt, and the slots of those who have it."""


def _parts(groups: list[_Group]) -> Iterator[list[_Group]]:
    """Split groups, the shortest prompt first, into batches of at most `PREFILL_TOKENS` tokens, padding included."""
    part: list[_Group] = []
    for group in groups:
        if part and (len(part) + 1) * len(group[0][0]) > PREFILL_TOKENS:
            yield part
            part = []
        part.append(group)
    if part:
        yield part


# ---- the thread


class SlotDecoder:
    """The decode loop of one model, in a thread that owns the batch from `start` on, except inside `exclusive`.

    The event loop's thread calls `submit` and `discard`, one control thread everything else.
    """

    def __init__(self, batch: SlotBatch, deliver: Callable[[list[Job]], None], patience: float) -> None:
        self._batch, self._deliver, self._patience = batch, deliver, patience
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._discarded: set[int] = set()
        self._holds = self._steps = 0
        self._parked, self._stopping = True, False
        self.failure: BaseException | None = None  # what killed the loop
        self._busy = 0.0
        self._device: torch.device = batch.model.device
        self._structure = ""  # what the model was found to take
        self._pair: Pair = (0, 0)
        self._hold = ExitStack()
        self._asleep = False
        # a daemon: a step that hangs must not keep the process from ending
        self._thread = threading.Thread(target=self._run, name="engine-decode", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.abandon()
        if self._thread.is_alive():
            self._thread.join(self._patience)

    def abandon(self) -> None:
        """End a loop that hangs as soon as its step ends, if ever; returns at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Jobs with the same prompt should come in one call: they share its prefill."""
        with self._changed:
            self._waiting.extend(jobs)
            self._changed.notify_all()

    def discard(self, ticket: int) -> None:
        with self._changed:
            self._discarded.add(ticket)
            self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the loop between two steps; nestable. `Unreachable`: it is dead. `DeadlineExceeded`: a step hangs."""
        with self._changed:
            self._holds += 1
            in_time = self._changed.wait_for(lambda: self._parked or self.failure is not None, self._patience)
        try:
            if self.failure is not None:
                raise Unreachable(f"the decode loop died: {self.failure!r}") from self.failure
            if not in_time:
                raise DeadlineExceeded(f"a decode step takes longer than {self._patience:g} s")
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    def apply(self, version: Version) -> None:
        """Replace all weights, or none (`WeightsError`): an error while they are copied is the end of the loop."""
        pair, model = version.pair, self._batch.model
        if pair == self._pair:
            return
        if pair < self._pair or pair[1] < self._pair[1]:
            raise WeightsError(f"version {pair} of the weights is older than {self._pair}, which is in force")
        if version.structure != self._structure:
            weights.check_weights(model, version.tensors)
            self._structure = version.structure
        targets = model.state_dict(keep_vars=True)
        with self.exclusive():
            try:
                weights.copy_weights([(targets[name], values) for name, values in version.tensors.items()])
                self._batch.swapped(version.number)
            except BaseException as error:
                self.failure = error
                raise
            self._pair = pair

    def sleep(self, level: Literal[0, 1]) -> None:
        if not self._asleep:
            self._hold.enter_context(self.exclusive())
            self._asleep = True
        if level:
            with self._changed:  # jobs that were begun wait before all others, and are computed again
                self._waiting.extendleft(reversed(self._batch.take()))
            self._batch.release()
            self._batch.model.to("cpu")

    def wake(self) -> None:
        self._batch.model.to(self._device)
        self._asleep = False
        self._hold.close()

    def close(self) -> list[Job]:
        """End all jobs and return them with what they have, `finish="abort"`."""
        with self._hold, self.exclusive(), self._changed:
            ending, self._waiting = self._waiting, deque()
            return [*ending, *self._batch.take()]

    def load(self, arriving: int) -> EngineLoad:
        batch = self._batch
        return EngineLoad(
            running=batch.active,
            waiting=len(self._waiting) + arriving,
            tokens_sampled=batch.tokens_sampled,
            busy_seconds=self._busy,
            version=batch.version,
            capacity=batch.slots,
            cache_use=batch.cache_use,
        )

    def progress(self) -> tuple[bool, int]:
        """(whether there is a step to make and the loop is not held, steps so far), from any thread."""
        return not self._parked, self._steps

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            logger.exception("decode loop died")
            with self._changed:
                self.failure = error
                self._changed.notify_all()

    def _turn(self) -> bool:
        with self._changed:
            self._parked = True
            self._changed.notify_all()
            self._changed.wait_for(self._has_work)
            if self._stopping or self.failure is not None:  # half of a version is no model to sample from
                return False
            self._parked = False
            self._drop_discarded()
            jobs = self._next_jobs()
        start = time.perf_counter()
        ended = self._batch.admit(jobs) if jobs else []
        if self._batch.active:
            ended += self._batch.step()
        self._busy += time.perf_counter() - start
        self._steps += 1
        if ended:
            self._deliver(ended)
        return True

    def _has_work(self) -> bool:
        return self._stopping or (not self._holds and bool(self._waiting or self._discarded or self._batch.active))

    def _drop_discarded(self) -> None:
        if self._discarded:
            self._waiting = deque(job for job in self._waiting if job.ticket not in self._discarded)
            self._batch.take(self._discarded)
            self._discarded = set()

    def _next_jobs(self) -> list[Job]:
        """In the order of arrival, when an eighth of the slots is free or nothing runs: prefill works in batches."""
        active = self._batch.active
        free = self._batch.slots - active
        if not self._waiting or not (8 * free >= self._batch.slots or active == 0):
            return []
        return [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
