"""The prompts that are trained, made when their groups are admitted, in a reproducible order.

The prompt of a group is a pure function of (seed, data, group id): the id is the cursor at which the group was
admitted, so a restarted feeder, or one whose Redis went back some seconds, admits the same prompt under the same id.
The ledger keeps a fingerprint of what the function depends on and refuses any other data.

```
group id -> pool, position     mixture: a shuffled block of 1,000 ids has each source as often as its weight says
position -> place in the order  long_prompts drop: the order is walked from its start, skipping what is too long
place    -> source, record      an epoch is a permutation of all records of the pool
record   -> prompt              streamrl.producers.dataset
```
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson

from streamrl.config import RunConfig
from streamrl.config.data import BLOCK, DataConfig, quotas
from streamrl.errors import ConfigError, DataError
from streamrl.images.store import ImageStore
from streamrl.producers.dataset import Faults, PromptLimits, PromptReader, PromptSet
from streamrl.producers.records import HEAD, Records, open_records
from streamrl.producers.tokenizer import Tokenizer

_CHUNK: Final = 1024
_HELD: Final = 256  # prompts that were made for groups which had no room yet


def permutation(count: int, seed: int, epoch: int, name: str = "") -> npt.NDArray[np.int64]:
    """Of `range(count)`, sorted by a keyed hash: NumPy's shuffles may change, and a run must survive an upgrade.

    The hash is splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
    """
    digest = hashlib.blake2b(f"{seed}/{epoch}{name and '/'}{name}".encode(), digest_size=8).digest()
    key = np.frombuffer(digest, dtype="<u8")
    mixed = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable").astype(np.int64)


def check_lengths(records: Sequence[Records], data: DataConfig) -> None:
    """`ConfigError`: an iterable, which may have no end, stands where its length is needed."""
    for one in records:
        if one.size is None and (data.epochs is not None or (len(records) > 1 and not data.weights)):
            what = f"{one.where} is an iterable, which may have no end: it has no epochs, and no place in one order"
            raise ConfigError(
                what, "set learner.steps and a weight for each source, or give it __len__ and __getitem__"
            )


class PromptPool:
    """Prompts of sources in one order, epoch after epoch; `name` is part of its key. `dropped` are too long."""

    def __init__(self, readers: Sequence[PromptReader], name: str, config: RunConfig, *, drop: bool) -> None:
        self._readers, self._name, self._seed, self._drop = readers, name, config.seed, drop
        self._shuffle, passes = config.data.shuffle, config.data.epochs
        sizes = [reader.records.size for reader in readers]
        self._begins = np.cumsum([0, *(size or 0 for size in sizes)])
        self.size = None if None in sizes else int(self._begins[-1])
        self._limit = None if passes is None or self.size is None else passes * self.size
        self._fitting = array("q")  # places that were walked over and are short enough
        self._walked = self.dropped = 0
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.zeros(0, np.int64))

    def prompt(self, position: int) -> bytes:
        self._walk(position, None)
        [prompt] = self._encode([self._fitting[position] if self._drop else position])
        assert prompt is not None
        return prompt[0]

    def end(self, before: int) -> int | None:
        """The position at which the passes end; None: not at `before` or earlier."""
        if not self._drop or self._limit is None:
            return self._limit
        self._walk(before, self._limit)
        return bisect_left(self._fitting, self._limit) if self._walked >= self._limit else None

    def epoch(self, position: int) -> int | None:
        if self._drop:
            position = self._fitting[position] if position < len(self._fitting) else self._walked
        return None if self.size is None else position // self.size

    def _walk(self, position: int, limit: int | None) -> None:
        while self._drop and len(self._fitting) <= position and (limit is None or self._walked < limit):
            places = range(self._walked, self._walked + _CHUNK)
            for place, prompt in zip(places, self._encode(places), strict=True):
                if prompt is not None:
                    self._fitting.append(place)
                self.dropped += prompt is None and place < (self.size or place + 1)
            self._walked = places.stop
            if not self._fitting and self._walked >= (self.size or 100 * _CHUNK):
                where = self._readers[0].records.where
                raise DataError(f"{where} has no prompts that are short enough", "raise data.max_prompt_tokens")

    def _encode(self, places: Sequence[int]) -> list[tuple[bytes, bytes] | None]:
        records, faults = [self._record(place) for place in places], Faults()
        found: dict[int, tuple[bytes, bytes] | None] = {}
        for number in {number for number, _ in records}:
            reader = self._readers[number]
            slots = [slot for slot, (of, _) in enumerate(records) if of == number]
            prompts = list(reader.encode(reader.records.read([records[slot][1] for slot in slots]), faults))
            faults.check()
            found |= zip(slots, prompts, strict=True)
        return [found[slot] for slot in range(len(places))]

    def _record(self, place: int) -> tuple[int, int]:
        """Which source, and which of its records."""
        if self.size is None:
            return 0, place
        epoch, row = divmod(place, self.size)
        if self._shuffle:
            if self._order[0] != epoch:
                self._order = epoch, permutation(self.size, self._seed, epoch, self._name)
            row = int(self._order[1][row])
        number = int(np.searchsorted(self._begins, row, "right")) - 1
        return number, row - int(self._begins[number])


class TrainingPrompts:
    """All prompts that a run trains, by the id of their group. Slow: call in a thread, in one at a time.

    `fingerprint` covers the sources, what is made of them, and the tokens and images of the first prompts of each.
    `ConfigError`, `DataError` or `PluginError`: sources that cannot be used, or faults in their first records.
    """

    def __init__(
        self, config: RunConfig, tokenizer: Tokenizer, limits: PromptLimits, store: ImageStore | None = None
    ) -> None:
        data = config.data
        self._readers = [
            PromptReader(source, open_records(source, config.plugin_paths), tokenizer, limits, store)
            for source in data.whole(data.train)
        ]
        check_lengths([reader.records for reader in self._readers], data)
        self._seed, self._passes = config.seed, data.epochs
        self._quotas = quotas(data.weights) if data.weights else []
        pools = {one.source.name: [one] for one in self._readers} if self._quotas else {"": self._readers}
        self._pools = [PromptPool(pool, name, config, drop=limits.drop) for name, pool in pools.items()]
        self.fingerprint = self._fingerprint()
        self.processor = "" if tokenizer.vision is None else tokenizer.vision.fingerprint
        self._ready: dict[int, bytes] = {}

    def _fingerprint(self) -> str:
        digest, faults = hashlib.blake2b(digest_size=16), Faults()
        for reader in self._readers:
            prompts = list(reader.encode(reader.records.first(HEAD), faults))
            faults.check()
            contents = [b"dropped" if prompt is None else prompt[1] for prompt in prompts]
            digest.update(reader.fingerprint + b"".join(contents))
        return digest.hexdigest()

    @property
    def dropped(self) -> int:
        return sum(pool.dropped for pool in self._pools)

    @property
    def of_code(self) -> bool:  # which may give something else the next time
        return not all(reader.records.identity for reader in self._readers)

    def prompt(self, group_id: int) -> bytes:
        """Encoded; the newest are kept, since a group that finds no room is admitted later."""
        if group_id not in self._ready:
            number, position = self._place(group_id)
            self._ready[group_id] = self._pools[number].prompt(position)
            for old in list(self._ready)[:-_HELD]:
                del self._ready[old]
        return self._ready[group_id]

    def end(self, before: int) -> int | None:
        """The group id at which `data.epochs` are over; None: not at `before` or earlier."""
        return None if self._passes is None else self._pools[0].end(before)

    def epoch(self, group_id: int) -> int | None:
        """None: sources end at different times, or nowhere."""
        return None if self._quotas else self._pools[0].epoch(group_id)

    def _place(self, group_id: int) -> tuple[int, int]:
        """Which pool, and which of its prompts."""
        if not self._quotas:
            return 0, group_id
        block, slot = divmod(group_id, BLOCK)
        order = np.repeat(np.arange(len(self._quotas)), self._quotas)[permutation(BLOCK, self._seed, block, "mixture")]
        number = int(order[slot])
        return number, block * self._quotas[number] + int(np.count_nonzero(order[:slot] == number))

    def pieces(self) -> Iterator[tuple[PromptReader, range]]:
        """All records that can be read ahead, piece by piece; code of the user is left alone."""
        for reader in self._readers:
            size = (reader.records.size or 0) if reader.records.identity else 0
            yield from ((reader, range(row, min(row + _CHUNK, size))) for row in range(0, size, _CHUNK))


def fingerprint_of(data: PromptSet | TrainingPrompts, **settings: int | bool) -> str:
    """Of the data, and of the settings that say which prompt a group has; the ledger refuses any other fingerprint."""
    options = orjson.dumps([data.fingerprint, settings], option=orjson.OPT_SORT_KEYS)
    digest = hashlib.blake2b(options, digest_size=16).hexdigest()
    return f"{digest} {data.processor}" if data.processor else digest
