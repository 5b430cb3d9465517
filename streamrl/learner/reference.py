"""The reference policy, whose distance the KL terms measure: a frozen copy, the base under an adapter, or servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch.distributed.tensor import DTensor

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.images.vision import vision_of
from streamrl.learner.batch import TrainSample
from streamrl.learner.model import LogProbModel
from streamrl.learner.model_loading import SMALL, load_rows, prepare
from streamrl.learner.optimizer import Offload
from streamrl.learner.ranks import Ranks
from streamrl.learner.reference_servers import ServerReference
from streamrl.learner.sharding import ShardedModel, check_fit
from streamrl.wire import Float32Array


class Reference(Protocol):
    """A policy that is not trained, so checkpoints need no state of it."""

    def compute_ref_log_prob(self, batch: Sequence[TrainSample]) -> list[Float32Array]:
        """Log-probability of each sampled token of this rank's samples, without gradients. Collective."""
        ...

    def to_host(self) -> None:
        """Free the device's memory. A repeat does nothing, as of `to_device`."""
        ...

    def to_device(self) -> None: ...


class FrozenReference(ShardedModel):
    """A copy that stays as it is: of another model, or of the one that training started from, also after a restart."""

    def __init__(self, config: RunConfig, ranks: Ranks, *, small: int = SMALL) -> None:
        learner, path = config.learner, config.learner.reference.path or config.model.path
        key = "learner.reference.path" if learner.reference.path else "model.path"
        base, rows = load_rows(config.model.model_copy(update={"path": path}), ranks, key)
        vision = vision_of(config.model.model_copy(update={"path": path}))
        model = LogProbModel(base, temperature=config.sampling.temperature, chunk=learner.logprob_chunk, vision=vision)
        model.requires_grad_(requires_grad=False)
        # As the actor's, so that both compute the same; nothing has to be computed a second time without gradients.
        own = learner.model_copy(update={"checkpoint_activations": False, "offload": ()})
        limits, _ = prepare(model, rows, config, own, ranks, small=small)
        super().__init__(model, ranks, limits)
        shards = [parameter.to_local() for parameter in model.parameters() if isinstance(parameter, DTensor)]
        # On a CPU there is no other memory to go to.
        elsewhere = ranks.device.type != "cpu"
        self._offloads = learner.reference.offload and elsewhere  # on the device only while it computes
        self._offload = Offload(shards, constant=elsewhere)
        if self._offloads:
            self._offload.to_host()

    def compute_ref_log_prob(self, batch: Sequence[TrainSample]) -> list[Float32Array]:
        self._offload.to_device()
        try:
            return self._compute(batch)[0]
        finally:
            self._reshard()
            if self._offloads:
                self._offload.to_host()

    def to_host(self) -> None:
        self._offload.to_host()

    def to_device(self) -> None:
        if not self._offloads:
            self._offload.to_device()


def make_reference(config: RunConfig, ranks: Ranks, policy: ShardedModel) -> Reference | None:
    reference = config.learner.reference
    if reference.kind == "remote":
        if policy.vision is not None:
            what = "learner.reference.kind remote sends servers token ids alone, and model.path takes images"
            raise ConfigError(what, "set learner.reference.kind to frozen, or to base with an adapter")
        return ServerReference(config, ranks, policy.vocabulary)
    if reference.kind != "frozen":
        return None
    frozen = FrozenReference(config, ranks)
    check_fit("learner.reference.path", reference.path or config.model.path, frozen, policy, config.model)
    return frozen
