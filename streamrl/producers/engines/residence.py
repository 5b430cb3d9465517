"""Where the parameters of a model are: on its device, in the host's memory, or nowhere."""

from __future__ import annotations

from typing import Any

import torch


class Residence:
    """Moves a model between its device and the host, and can give its parameters up. Not thread-safe.

    A model that has given its parameters up keeps their names, shapes, types and ties, so that a version of the weights
    can be checked against it.

    Args:
        model: on the device that it is to come back to.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._home: torch.device = model.device
        self.forgotten = False

    @property
    def leaves_something(self) -> bool:
        """Whether `leave` frees memory of an accelerator; on a CPU the host's memory is the device's."""
        return self._home.type != "cpu"

    def leave(self) -> None:
        """Move everything to the host."""
        self._model.to("cpu")

    def forget(self) -> None:
        """Free the parameters; buffers, which no version brings, move to the host."""
        for parameter in self._model.parameters():
            # one number stands for all of them, so the shape stays and the memory goes
            parameter.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        self._model.to("cpu")
        self.forgotten = True

    def remember(self) -> None:
        """Make room for the parameters that were given up; their values mean nothing until they are written."""
        if self.forgotten:
            for parameter in self._model.parameters():
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            self.forgotten = False

    def come_home(self) -> None:
        """Move everything back to the device."""
        self._model.to(self._home)
