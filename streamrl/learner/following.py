"""The learner's ranks other than 0: do what rank 0 broadcasts, with their own groups read from Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from streamrl.config import RunConfig
from streamrl.learner.batch import TrainSample
from streamrl.learner.chain import Branch
from streamrl.learner.checkpoint import Checkpoints
from streamrl.learner.crew import NO_BASE, Command, TorchThread
from streamrl.learner.groups import GroupOpener, Unusable
from streamrl.learner.parts import Parts
from streamrl.learner.steps import Trainer
from streamrl.queues.ledger import Ledger
from streamrl.weight_sync.manifest import PINNED, folder_name

logger = logging.getLogger(__name__)


class FollowingRank:
    """A rank other than 0.

    Args:
        config: of the run.
        run_dir: of the run.
        ledger: the training ledger, only read.
        trainer: this rank's share of the policy.
        torch: this rank's torch thread.
    """

    def __init__(self, config: RunConfig, run_dir: Path, ledger: Ledger, trainer: Trainer, torch: TorchThread) -> None:
        self._branch = Branch([], [], 0, 0)
        self._open = GroupOpener(self._branch, trainer.recipe, trainer.misfit)
        self._run_dir, self._ledger = run_dir, ledger
        self._trainer, self._torch = trainer, torch
        self._checkpoints = Checkpoints(run_dir / "checkpoints")
        self._parts = Parts(config.weights, run_dir, trainer.ranks.rank)

    async def run(self) -> None:
        """Follow commands until `STOP`; rank 0 alone decides when, also on SIGTERM.

        Raises:
            DeadlineExceeded: rank 0 said nothing for `learner.collective_deadline`.
            Unreachable: another rank is gone.
        """
        try:
            while True:
                command, *arguments = await self._torch.run(self._trainer.ranks.broadcast_ints)
                if command == Command.STOP:
                    return
                await self._do(Command(command), arguments)
        finally:
            self._parts.close()

    async def _do(self, command: Command, arguments: Sequence[int]) -> None:
        trainer = self._trainer
        match command:
            case Command.TRAIN:
                await self._train(arguments[::2], arguments[1::2])
            case Command.APPLY:
                await self._torch.compute(trainer.apply, arguments[0], arguments[1])
            case Command.HISTORY:
                for version, step in zip(arguments[::2], arguments[1::2], strict=True):
                    self._branch.note(version, step)
            case Command.PUBLISH:
                await self._publish(arguments)
            case Command.SAVE:
                place = arguments[0], arguments[1]
                await self._torch.run(trainer.state.save, self._checkpoints.draft(place))
            case Command.ADOPT:
                folder = self._run_dir / PINNED / folder_name(arguments[0], arguments[1])
                await self._torch.run(trainer.adopt, folder)
            case Command.EXPORT:
                await self._torch.run(trainer.export, self._run_dir / "model")
            case Command.LOAD:
                folder = self._checkpoints.path((arguments[0], arguments[1]))
                await self._torch.run(trainer.load, folder, self._checkpoints.read_meta(folder))
            case Command.DISCARD | Command.SAVED | Command.UNLOAD | Command.RELOAD:
                parts: dict[int, Callable[[], object]] = {
                    Command.DISCARD: trainer.discard,
                    Command.SAVED: trainer.state.saved,
                    Command.UNLOAD: trainer.unload,
                    Command.RELOAD: trainer.reload,
                }
                await self._torch.run(parts[command])
            case _:
                pass

    async def _publish(self, numbers: Sequence[int]) -> None:
        pair, base = (numbers[0], numbers[1]), (numbers[2], numbers[3])
        self._branch.note(pair[1], self._trainer.step)
        if self._parts.busy:
            await self._torch.run(self._trainer.skip_snapshot)
            await self._parts.refuse(pair)
            return
        snapshot = await self._torch.compute(self._trainer.snapshot)
        self._parts.start(pair, None if NO_BASE in base else base, snapshot)

    async def _train(self, gids: Sequence[int], owners: Sequence[int]) -> None:
        mine = [gid for gid, owner in zip(gids, owners, strict=True) if owner == self._trainer.ranks.rank]
        samples = await self._read(mine)
        await self._torch.compute(self._trainer.train, gids, samples, idle=max(owners) < 0)

    async def _read(self, gids: Sequence[int]) -> list[TrainSample] | None:
        """The samples of my groups; None when one of them is not there (any more)."""
        async with asyncio.TaskGroup() as tasks:
            reads = [tasks.create_task(self._ledger.read_group(gid)) for gid in gids]
        samples: list[TrainSample] = []
        for gid, read in zip(gids, reads, strict=True):
            closed = read.result()
            if closed is None:
                logger.warning("group is not there", extra={"group": gid})
                return None
            try:
                group = self._open(closed)
            except Unusable as error:
                logger.warning("group cannot be read", extra={"group": gid, "error": str(error)})
                return None
            samples.extend(group.samples)
        return samples
