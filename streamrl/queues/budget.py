"""The bounds of admission (promise 2), as pure functions of counts.

A group is *untrained* from its admission until a step has consumed it, and *live* until it is retired. The scripts
`admit` and `replay` hold both bounds; nothing here is derived from a version, which survives a restart of the learner
while the steps do not.
"""

from __future__ import annotations


def budget(max_staleness: int, groups_per_step: int) -> int:
    """Untrained groups at most: those of the running step and of `max_staleness` steps ahead of it."""
    return (max_staleness + 1) * groups_per_step


def hard_cap(budget: int, checkpoint_every: int, groups_per_step: int, *, asynchronous: bool = False) -> int:
    """Live groups at most: the budget and what is trained between two checkpoints.

    With asynchronous checkpoints a second interval may be trained while the first is being written.
    """
    return budget + (2 if asynchronous else 1) * checkpoint_every * groups_per_step


def room(live: int, held: int, budget: int, hard_cap: int) -> int:
    """Groups that may be admitted now (never negative).

    Args:
        live: groups in Redis.
        held: of these, trained and not yet retired.
        budget: bound of the untrained ones.
        hard_cap: bound of all.
    """
    return max(0, min(budget - (live - held), hard_cap - live))


def checkpoint_due(steps: int, every: int, held: int, budget: int, hard_cap: int) -> bool:
    """Whether the learner has to save now.

    Args:
        steps: since the last checkpoint.
        every: steps between checkpoints.
        held: trained groups that are still in Redis; at their share of the hard cap admission stops until they retire.
        budget: bound of the untrained groups.
        hard_cap: bound of the live groups.
    """
    return steps > 0 and (steps >= every or held >= hard_cap - budget)
