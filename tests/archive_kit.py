"""Closed groups as a ledger gives them, and an archive with some of them."""

from __future__ import annotations

from pathlib import Path

from streamrl import wire
from streamrl.archive.writer import Archive
from streamrl.config import ArchiveConfig, RunConfig
from streamrl.queues.records import ClosedGroup


def configured(**archive) -> RunConfig:
    return RunConfig(name="kept", archive=ArchiveConfig(**{"max_bytes": None, **archive}))


def prompt_of(group_id: int, *, evaluation: bool = False) -> wire.Prompt:
    return wire.Prompt(
        tokens=wire.pack_int32([group_id, 2]),
        text=f"{group_id} + 1 =",
        answer=str(group_id + 1),
        metadata={"level": group_id % 3},
        line=group_id,
        evaluation=evaluation,
    )


def response_of(group_id: int, number: int) -> wire.Sample:
    """Right when group and number are both even or both odd."""
    right = (group_id + number) % 2 == 0
    return wire.Sample(
        tokens=wire.pack_int32([5, 6, 7][: 1 + number % 3]),
        logprobs=wire.pack_float32([-0.25, -0.5, -0.75][: 1 + number % 3]),
        runs=[(0, 3)],
        finish="stop",
        text=str(group_id + 1 if right else group_id),
        engine="hf",
    )


def score_of(group_id: int, number: int) -> wire.SampleScore:
    value = float((group_id + number) % 2 == 0)
    return wire.SampleScore(value=value, parts={"exact_match": value}, seconds=0.25)


def closed(
    group_id: int,
    *,
    attempt: int = 1,
    samples: int = 4,
    dead: tuple[int, ...] = (),
    bonus: float = 0.0,
    evaluation=False,
) -> ClosedGroup:
    """A group with `samples` responses, of which those in `dead` have a cause of death."""
    alive = [number for number in range(samples) if number not in dead]

    def score(number: int) -> bytes:
        found = score_of(group_id, number)
        return wire.encode(wire.SampleScore(value=found.value + bonus, parts=found.parts, seconds=found.seconds))

    return ClosedGroup(
        group_id=group_id,
        size=samples,
        attempt=attempt,
        version=3,
        prompt=wire.encode(prompt_of(group_id, evaluation=evaluation)),
        samples={number: (wire.encode(response_of(group_id, number)), score(number)) for number in alive},
        causes={number: f"deadline: sample {number}" for number in dead},
        crashes=0,
    )


def kept_up(archive: Archive) -> None:
    """Wait until no file is copied or thinned any more."""
    try:
        archive._upkeep.submit(int).result(60)
    except RuntimeError:  # it is closed
        archive._upkeep.shutdown()


async def archived(run_dir: Path, config: RunConfig, *groups: ClosedGroup, evaluation: bool = False) -> None:
    """One life of a process that archives these groups."""
    archive = Archive(config, run_dir, evaluation=evaluation)
    for group in groups:
        archive.add(group)
    await archive.close()
    kept_up(archive)
    assert (archive.written, archive.lost) == (len(groups), 0)
