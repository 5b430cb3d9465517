"""What the model talks to: one object for each sample. The run file names it as `my_tools:LookUp`."""


class LookUp:
    """A table that only the tool can read."""

    async def reset(self, numbers: dict[str, int]) -> None:
        """Begin a sample; the arguments are keys of its line in the data set. Returned text is added to the prompt."""
        self._numbers = numbers

    async def look_up(self, key: str) -> str:
        """Return the number of a key. Every public method is a tool; the model reads this text.

        Args:
            key: two letters.
        """
        return str(self._numbers[key])  # the model reads an error as the answer to its call
