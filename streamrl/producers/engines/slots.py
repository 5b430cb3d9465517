"""Static-slot decoding of an unmodified Hugging Face causal language model.

Up to `slots` sequences are decoded together, one token each per step. Their keys and values stay where they are
(`kv.SlotCache`); a step runs over the first slots, as many as needed, and attends over the longest of them rounded up
to 16. A free slot in between computes something that nobody reads; when an eighth is free and nobody waits, the last
sequences move into the gaps. Prompts that come together and are equal are computed once.

For models whose forward pass is cheap this is three to five times faster than paged batching, whose bookkeeping and
block mask grow with the batch (docs/internals/servers.md has the figures). No threads here: `slot_decoder` drives it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from streamrl.engine import Finish
from streamrl.errors import WeightsError
from streamrl.producers.engines.decoder import Job, Outcome, Progress
from streamrl.producers.engines.kv import SlotCache, round_up
from streamrl.producers.engines.sampling import sample
from streamrl.producers.engines.spans import Spans

PREFILL_TOKENS = 4096


@dataclass(slots=True, eq=False)
class _Row:
    """A sequence in a slot."""

    job: Job
    spans: Spans
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    told: int = 0

    @property
    def length(self) -> int:
        """Tokens whose keys and values exist after the next step."""
        return len(self.job.prompt) + len(self.tokens)

    def news(self) -> Progress:
        """Return what has come since the call before."""
        start, self.told = self.told, len(self.tokens)
        return Progress(self.job.ticket, self.tokens[start:], self.logprobs[start:])

    def outcome(self, finish: Finish) -> Outcome:
        return Outcome(self.job.ticket, self.tokens, self.logprobs, self.spans.runs(len(self.tokens)), finish)


class SlotBatch:
    """The sequences being decoded, and the step that moves all of them on by one token. Not thread-safe.

    Args:
        model: causal language model in evaluation mode; full attention in every layer (`model.slots_obstacle`).
        slots: sequences decoded together.
        context: longest prompt plus response.
        stop_tokens: ids that end a response.
        generator: source of randomness on the model's device.
        version: version of the weights at the start.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        context: int,
        stop_tokens: frozenset[int],
        generator: torch.Generator,
        version: int = 0,
    ) -> None:
        self.slots = slots
        self.context = context
        self.version = version
        self.tokens_sampled = 0
        self._model = model
        self._dtype: torch.dtype = model.dtype
        self._stop = stop_tokens
        self._generator = generator
        self._keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        config = model.config.get_text_config()
        self._cache = SlotCache(config.num_hidden_layers, slots, context)
        self._rows: list[_Row | None] = [None] * slots
        self._heard: dict[int, _Row] = {}
        self._high = 0
        device = model.device
        self._token = torch.zeros(slots, dtype=torch.long, device=device)
        self._position = torch.zeros(slots, dtype=torch.long, device=device)
        self._taken = torch.zeros(slots, dtype=torch.long, device=device)
        self._temperature = torch.ones(slots, dtype=torch.float32, device=device)
        self._ruler = torch.arange(round_up(context), device=device)

    @property
    def active(self) -> int:
        """Sequences being decoded."""
        return self.slots - self._rows.count(None)

    @torch.inference_mode()
    def admit(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Compute the prompts of at most `slots - active` jobs, sample their first tokens; return those that ended."""
        free = [slot for slot, row in enumerate(self._rows) if row is None]
        groups: dict[tuple[int, ...], list[int]] = {}
        for slot, job in zip(free, jobs, strict=False):
            row = self._rows[slot] = _Row(job, Spans(self.version))
            if job.streams:
                self._heard[job.ticket] = row
            self._temperature[slot] = job.temperature
            groups.setdefault(job.prompt, []).append(slot)
        ended: list[Outcome] = []
        for prompts in _parts(sorted(groups, key=len)):
            ended += self._prefill(prompts, [groups[prompt] for prompt in prompts])
        return ended

    def _prefill(self, prompts: list[tuple[int, ...]], groups: list[list[int]]) -> list[Outcome]:
        """One forward pass over distinct prompts, padded on the right; the causal mask keeps the padding out."""
        device = self._token.device
        flat = [slot for group in groups for slot in group]
        slots = torch.tensor(flat, device=device)
        sources = torch.tensor([row for row, group in enumerate(groups) for _ in group], device=device)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        # the head runs only where some prompt of the batch ends; each row then picks its own end
        ends = torch.unique(last) if self._keep else self._ruler[: len(prompts[-1])]
        output = self._fill(prompts, sources, slots, ends)
        logits = output.logits[torch.arange(len(prompts), device=device), torch.searchsorted(ends, last)]
        tokens, logprobs = sample(logits[sources], self._heat(slots), self._generator)
        self._token[slots] = tokens
        self._position[slots] = last[sources] + 1
        self._taken[slots] = 1
        self._high = max(self._high, *(slot + 1 for slot in flat))
        return self._record(flat, tokens.tolist(), logprobs.tolist())

    def _fill(
        self, prompts: list[tuple[int, ...]], sources: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor
    ) -> Any:
        """Compute keys and values of prompts, the longest last, into slots; logits at `ends` where the model can."""
        longest = len(prompts[-1])
        inputs = torch.tensor([prompt + (0,) * (longest - len(prompt)) for prompt in prompts], device=slots.device)
        self._cache.reserve(longest)
        self._cache.prefill(sources, slots)
        return self._model(
            input_ids=inputs,
            position_ids=self._ruler[:longest].expand(len(prompts), -1),
            past_key_values=self._cache,
            use_cache=True,
            **({"logits_to_keep": ends} if self._keep else {}),
        )

    @torch.inference_mode()
    def recompute(self) -> None:
        """Compute all keys and values anew by the present weights.

        The token sampled last has none yet: the next step makes them, as it would have without this.
        """
        known = {slot: (*row.job.prompt, *row.tokens[:-1]) for slot, row in self._active()}
        order = sorted(known, key=lambda slot: len(known[slot]))
        device = self._token.device
        for prompts in _parts([known[slot] for slot in order]):
            slots, order = order[: len(prompts)], order[len(prompts) :]
            rows = torch.arange(len(prompts), device=device)
            self._fill(prompts, rows, torch.tensor(slots, device=device), self._ruler[:1])

    def news(self) -> list[Progress]:
        """What the sequences that somebody listens to have sampled since the last call."""
        return [row.news() for row in self._heard.values()]

    @property
    def cache_use(self) -> float:
        """Share of the keys and values that all slots may have."""
        # from any thread: a row that has just gone is None, and one that just moved counts twice for a moment
        used = sum(row.length for row in tuple(self._rows) if row is not None)
        return min(1.0, used / (self.slots * self.context))

    @torch.inference_mode()
    def step(self) -> list[Outcome]:
        """Sample the next token of every sequence; return those that ended."""
        self._compact()
        count = self._high
        position = self._position[:count]
        longest = max(row.length for _, row in self._active())
        span = round_up(longest)
        self._cache.reserve(longest)
        self._cache.decode(position, span)
        mask = torch.zeros(count, 1, 1, span, dtype=self._dtype, device=position.device)
        mask.masked_fill_(self._ruler[:span] > position[:, None, None, None], -math.inf)
        output = self._model(
            input_ids=self._token[:count, None],
            position_ids=position[:, None],
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
        )
        tokens, logprobs = sample(output.logits[:, -1], self._heat(slice(count)), self._generator)
        self._token[:count] = tokens
        # a free slot stays at position 0, so that it always has one row to attend to
        position += self._taken[:count]
        return self._record(range(count), tokens.tolist(), logprobs.tolist())

    def take(self, tickets: Collection[int] | None) -> list[Outcome]:
        """End sequences (all when None) as they are."""
        ending = [(slot, row) for slot, row in self._active() if tickets is None or row.job.ticket in tickets]
        self._free([slot for slot, _ in ending])
        return [row.outcome("abort") for _, row in ending]

    def swapped(self, version: int) -> None:
        """The weights have changed: tokens from now on belong to `version`."""
        self.version = version
        for _, row in self._active():
            row.spans.swap(len(row.tokens), version)

    def release(self) -> None:
        """Free the keys and values; only without sequences. The next `admit` allocates again."""
        self._cache.free()

    def _active(self) -> Iterator[tuple[int, _Row]]:
        return ((slot, row) for slot, row in enumerate(self._rows) if row is not None)

    def _heat(self, slots: torch.Tensor | slice) -> torch.Tensor | None:
        """Temperatures of slots, None when all are 1 (the usual case, and a division saved)."""
        if all(row.job.temperature == 1.0 for _, row in self._active()):
            return None
        return self._temperature[slots]

    def _record(self, slots: Sequence[int], tokens: list[int], logprobs: list[float]) -> list[Outcome]:
        """Append what was sampled and end what is complete."""
        ended: list[Outcome] = []
        freed: list[int] = []
        total = 0.0
        for slot, token, logprob in zip(slots, tokens, logprobs, strict=True):
            row = self._rows[slot]
            if row is None:
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            total += logprob
            self.tokens_sampled += 1
            if token in self._stop or len(row.tokens) == row.job.limit:
                ended.append(row.outcome("stop" if token in self._stop else "length"))
                freed.append(slot)
        if not math.isfinite(total):
            raise WeightsError(f"version {self.version} of the weights gives log-probabilities that are not finite")
        self._free(freed)
        return ended

    def _free(self, slots: list[int]) -> None:
        if not slots:
            return
        for slot in slots:
            row = self._rows[slot]
            if row is not None:
                self._heard.pop(row.job.ticket, None)
            self._rows[slot] = None
        self._position[slots] = 0
        self._taken[slots] = 0
        while self._high and self._rows[self._high - 1] is None:
            self._high -= 1

    def _compact(self) -> None:
        """Move the last sequences into gaps when an eighth of the range would be computed for nothing."""
        active = self.active
        if 8 * (self._high - active) < self._high:
            return
        sources = [slot for slot in range(active, self._high) if self._rows[slot] is not None]
        targets = [slot for slot in range(active) if self._rows[slot] is None]
        length = max(row.length for _, row in self._active())
        self._cache.move(sources, targets, min(length, self._cache.get_max_length()))
        for name in ("_token", "_position", "_taken", "_temperature"):
            values: torch.Tensor = getattr(self, name)
            values[targets] = values[sources]
        for source, target in zip(sources, targets, strict=True):
            self._rows[target], self._rows[source] = self._rows[source], None
        self._position[active : self._high] = 0
        self._taken[active : self._high] = 0
        self._high = active


def _parts(prompts: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Split prompts, shortest first, into batches of at most `PREFILL_TOKENS` tokens, padding included."""
    part: list[tuple[int, ...]] = []
    for prompt in prompts:
        if part and (len(part) + 1) * len(prompt) > PREFILL_TOKENS:
            yield part
            part = []
        part.append(prompt)
    if part:
        yield part
