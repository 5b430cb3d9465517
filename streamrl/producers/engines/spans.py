"""Which version of the weights sampled which token of a request."""

from __future__ import annotations

from streamrl.engine import Runs


class Spans:
    """The version runs of one request, kept up to date at every change of the weights.

    Args:
        version: version in force when the request began.
    """

    __slots__ = ("_runs",)

    def __init__(self, version: int) -> None:
        self._runs: Runs = [(0, version)]

    def swap(self, sampled: int, version: int) -> None:
        """Note that tokens from index `sampled` on are sampled by `version`; two swaps without a token are one."""
        if self._runs[-1][0] == sampled:
            self._runs.pop()
        self._runs.append((sampled, version))

    def runs(self, sampled: int) -> Runs:
        """The runs of the first `sampled` tokens: `[(first token, version), ...]`, empty without a token."""
        return [run for run in self._runs if run[0] < sampled]
