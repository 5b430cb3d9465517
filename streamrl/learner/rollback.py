"""Going back to the weights of an earlier version because a person asked for it (`streamrl weights rollback`).

```
asked -> every rank loads its rows of the pinned version, moments 0 -> published under a new number: `shown`
      -> a checkpoint with a later step holds the weights: `done`
```
A learner that dies before `done` is followed by one that starts from an older checkpoint, so that one does it again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamrl.learner.crew import Command, Crew
from streamrl.queues.rollback import Answer, Request, RollbackDesk
from streamrl.weight_sync.manifest import PINNED, folder_name

logger = logging.getLogger(__name__)
_REFUSAL: Final = (
    "not all ranks could load it: it is not pinned (any more), or of another model; the log of the learner says more"
)


@dataclass
class _Going:
    """A request that was followed.

    Attributes:
        request: what was asked for.
        version: number under which the weights are published, or tried to be.
        step: of the learner; a checkpoint after it holds the weights.
        answer: given so far.
    """

    request: Request
    version: int
    step: int
    answer: Answer = Answer.WAITING


class Rollbacks:
    """The learner's side of requests to go back; rank 0 has one.

    Args:
        desk: where requests are.
        nonce: of this learner.
        crew: this rank and the others.
        run_dir: of the run.
    """

    def __init__(self, desk: RollbackDesk, nonce: str, crew: Crew, run_dir: Path) -> None:
        self._desk, self._nonce, self._crew = desk, nonce, crew
        self._folder = run_dir / PINNED
        self._going: _Going | None = None
        self._known = ""

    async def look(self, *, published: int, saved: int) -> Request | None:
        """Say how far the request is that was followed, and return one that has not been looked at yet.

        A request is followed once, whatever Redis forgets of it meanwhile. Call it once per step.

        Args:
            published: newest version that engines can see.
            saved: step of the newest checkpoint.
        """
        request = await self._desk.look()
        going = self._going
        if going is not None:
            answer = going.answer
            if going.answer is Answer.WAITING:
                going.version = max(going.version, published)  # a number whose files could not be written is left out
            if published >= going.version:
                answer = Answer.DONE if saved > going.step else Answer.SHOWN
            same = request is not None and request.id == going.request.id
            if same and request is not None and answer != request.answer:
                await self._desk.answer(self._nonce, going.request.id, answer, str(going.version))
            going.answer = answer
        if request is None or request.id == self._known or request.answer in {Answer.DONE, Answer.REFUSED}:
            return None
        self._known = request.id
        return request

    async def follow(self, request: Request, version: int, step: int) -> bool:
        """Have all ranks take the weights of the version that is asked for; False: refused, nothing was changed.

        Call it between two steps; then publish under `version`.

        Args:
            request: from `look`.
            version: the next number.
            step: of the learner.
        """
        pair = (request.epoch, request.version)
        folder = self._folder / folder_name(*pair)
        trainer = self._crew.trainer
        if not await self._crew.order(Command.ADOPT, pair, lambda: trainer.adopt(folder)):
            logger.warning("rollback refused", extra={"version": request.version, "folder": str(folder)})
            self._going = None
            await self._desk.answer(self._nonce, request.id, Answer.REFUSED, _REFUSAL)
            return False
        logger.warning("weights rolled back", extra={"to": request.version, "version": version, "step": step})
        self._going = _Going(request, version, step)
        return True
