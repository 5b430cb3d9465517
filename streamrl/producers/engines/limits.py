"""What a model can be asked: requests that can never be served are refused before they reach a decode loop."""

from __future__ import annotations

import math
from dataclasses import dataclass

from streamrl.engine import Request
from streamrl.errors import DataError


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can serve.

    Attributes:
        context: longest prompt plus response in tokens.
        vocabulary: token ids lie below it.
    """

    context: int
    vocabulary: int

    def check(self, request: Request) -> int:
        """Return how many tokens the response may have.

        Raises:
            DataError: the request can never be served; the message names it.
        """
        tokens = request.tokens
        name = f"request {request.id!r}"
        if tokens.ndim != 1 or not len(tokens):
            raise DataError(f"{name} has an empty prompt")
        room = self.context - len(tokens)
        if room < 1:
            raise DataError(f"{name}: {len(tokens)} prompt tokens fill a context of {self.context}")
        if tokens.min() < 0 or tokens.max() >= self.vocabulary:
            raise DataError(f"{name} has a token outside the vocabulary of {self.vocabulary}")
        if request.max_new_tokens < 1:
            raise DataError(f"{name}: max_new_tokens is {request.max_new_tokens}")
        if not (0 <= request.temperature < math.inf):
            raise DataError(f"{name}: temperature is {request.temperature}")
        return min(request.max_new_tokens, room)
