"""The tools demo for the chaos runs: answers cannot be had again, and the tool hangs where the prompt says so."""

import asyncio
import random


class LookUp:
    """A table that lies half of the time, so that a call that runs again is seen: its number is another one."""

    async def reset(self, numbers: dict[str, int], poison: str = "") -> None:
        self._numbers, self._hangs = numbers, poison == "hang tool"
        self._said: list[int] = []

    async def look_up(self, key: str) -> str:
        """Return the number of a key.

        Args:
            key: two letters.
        """
        await asyncio.sleep(0.1)  # time for a death
        if self._hangs:
            await asyncio.Event().wait()
        self._said.append(random.choice([self._numbers[key], random.randint(10, 99)]))
        return str(self._said[-1])

    def get_state(self) -> list[int]:
        return self._said

    def set_state(self, state: list[int]) -> None:
        self._said = state

    def get_reward(self) -> float:
        """The sum of what the model was told, which the audit reads in its turns as well."""
        return float(sum(self._said))
