"""All members of a role behind one object: verl's WorkerGroup for workers that take their work by themselves."""

from __future__ import annotations

from collections.abc import Callable

from streamrl.runtime.unit import Unit


class WorkerGroup:
    """The members of a role of a run, on whatever machines they are placed.

    In verl a group is sent method calls, and splits their arguments among its workers. Here the members lease samples
    from Redis: who is faster takes more, and the work of a dead one goes to the others. What is left to a group is who
    lives, the same order to all (`all`), and members that come and go. Each member is a `Unit`, which replaces its
    process when that dies; all ranks of the learner are one member.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: list[Unit] = []

    def all(self, order: Callable[[Unit], None]) -> None:
        """Give the same order to all members."""
        for unit in self.members:
            order(unit)

    def add(self, unit: Unit) -> None:
        self.members.append(unit)

    def remove(self) -> Unit:
        """Take the newest member out; it still runs."""
        return self.members.pop()
