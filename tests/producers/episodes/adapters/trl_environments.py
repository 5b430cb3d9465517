"""Environment classes and tools as the documentation of TRL has them ("OpenEnv integration", "Agent training")."""

import random


class IncrementEnv:
    """From the documentation of `GRPOTrainer`."""

    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        return None

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


class GuessEnv:
    def __init__(self):
        self.secret = None

    def reset(self, prompt, answer, level, **kwargs) -> str | None:
        assert "environment" not in kwargs
        self.secret = int(answer)
        self.guesses = 0
        return f" Level {level}."

    def guess(self, number: int) -> str:
        """
        Guess the secret number.

        Args:
            number: The guess.

        Returns:
            Whether the secret is higher or lower.
        """
        self.guesses += 1
        return "right" if number == self.secret else "higher" if number < self.secret else "lower"

    async def get_reward(self) -> float:
        return 1.0 / self.guesses if self.guesses else 0.0


FACTORIES = {"increment": IncrementEnv, "guess": GuessEnv}


class Undocumented:
    def act(self, what):
        return what


NOT_CALLABLE = {"increment": 3}


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def roll(sides: int = 6) -> int:
    """
    Rolls a die.

    Args:
        sides: How many sides it has.
    """
    return random.Random(sides).randint(1, sides)


def add(a: int, b: int) -> int:
    """
    Adds two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a + b
