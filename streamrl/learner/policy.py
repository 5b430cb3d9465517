"""The policy that is trained: a causal language model under FSDP2, with streaming accumulation of gradients.

A step is any number of `accumulate` calls, each with whatever samples have come in, and one `apply_update`. The loss
that is differentiated is the sum over tokens; the division by the number of tokens of the whole step comes at the end,
when that number is known. So a step gives the same weights in whatever pieces its samples came, up to the rounding of
float sums.

Every method marked collective must be called by all ranks in the same order, from one thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from streamrl.config import RunConfig
from streamrl.errors import StreamrlError
from streamrl.learner.batch import PADDING, Microbatch, TrainSample, dummy, layout
from streamrl.learner.export import full_tensors, write_model
from streamrl.learner.losses import TOKEN_SUMS, TokenSums, decoupled_ppo
from streamrl.learner.model import LogProbModel, row_limits
from streamrl.learner.offload import Offload
from streamrl.learner.optimizer import ShardedAdamW
from streamrl.learner.ranks import Ranks
from streamrl.learner.results import LogProbs, MicroStats, UpdateStats
from streamrl.learner.sharding import SMALL, load_model, shard

logger = logging.getLogger(__name__)


class Policy:
    """A causal language model in training, sharded over the ranks of the learner.

    Args:
        config: the run. Float32 matmul precision and CPU threads of this process are set from it.
        ranks: the ranks of this learner; every rank makes a policy with the same configuration.
        small: models with fewer parameters than this are one FSDP unit.

    Raises:
        ConfigError: the model is missing, is no causal language model, or computes logits in a way we do not know.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, *, small: int = SMALL) -> None:
        self.config = config
        self.ranks = ranks
        learner = config.learner
        if learner.threads is not None:
            torch.set_num_threads(learner.threads)
        model = LogProbModel(
            load_model(config.model), temperature=config.sampling.temperature, chunk=learner.logprob_chunk
        )
        model.check()
        self._limits = row_limits(config, model)
        # After the two trials above, which compare numbers and want them exact.
        torch.set_float32_matmul_precision(learner.matmul_precision)
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._whole = shard(model, ranks.mesh, self._dtype, small=small)
        self._model = model
        self._sums = torch.zeros(len(TOKEN_SUMS), dtype=torch.float64, device=ranks.device)
        with torch.no_grad():
            # FSDP finishes its set-up in the first forward; only then are the local tensors the ones that will stay.
            self._forward(dummy())
        self._fsdp.reshard()
        self._fsdp.set_reshard_after_backward(not self._whole)
        self._parameters = {
            name.removeprefix("model."): parameter
            for name, parameter in model.named_parameters()
            if isinstance(parameter, DTensor)
        }
        self._optimizer = ShardedAdamW(self._parameters, learner)
        self._offload = Offload(self._optimizer.live().values())

    @property
    def updates(self) -> int:
        """Updates applied so far."""
        return self._optimizer.updates

    @property
    def parameters(self) -> dict[str, DTensor]:
        """Sharded parameters by Hugging Face name; tied ones appear once."""
        return dict(self._parameters)

    def compute_log_prob(self, batch: Sequence[TrainSample], calculate_entropy: bool = False) -> LogProbs:
        """Return log-probabilities of the sampled tokens under the present weights. Collective, without gradients.

        Args:
            batch: this rank's samples, possibly none; advantages and behaviour log-probs are not used.
            calculate_entropy: also return the entropy at each sampled token.

        Raises:
            ValueError: a sample does not fit the model; the other ranks get a StreamrlError.
        """
        logprobs = [np.zeros(0, dtype=np.float32) for _ in batch]
        entropy = [np.zeros(0, dtype=np.float32) for _ in batch]
        for part in self._agree(batch):
            with torch.no_grad():
                logprob, spread = self._forward(part, calculate_entropy)
            ends = np.cumsum(part.counts)[:-1]
            for target, values in ((logprobs, logprob), (entropy, spread)):
                if values is not None and len(part.samples):
                    pieces = np.split(values.cpu().numpy(), ends)
                    for index, piece in zip(part.samples, pieces, strict=True):
                        target[index] = piece
        return LogProbs(logprobs=logprobs, entropy=entropy if calculate_entropy else None)

    def accumulate(self, batch: Sequence[TrainSample]) -> MicroStats:
        """Add the gradient of the loss of these samples, summed over tokens. Collective; one all-reduce of our own.

        Samples with zero advantage are skipped, which is exact: their loss has no gradient. Their tokens still count
        in what is given to `apply_update`. The proximal policy is the present one, since there is one update per step,
        so no extra pass is made for it.

        Args:
            batch: this rank's samples, possibly none.

        Returns:
            What was done on this rank, from numbers known to the host: nothing waits for the device.

        Raises:
            ValueError: a sample does not fit the model; the other ranks get a StreamrlError. No gradient was added.
        """
        live = [sample for sample in batch if sample.advantage]
        parts = self._agree(live)
        for place, part in enumerate(parts):
            # A whole model keeps its gradients unsharded between the passes and reduces them once.
            self._fsdp.set_requires_gradient_sync(not self._whole or place == len(parts) - 1)
            self._backward(part)
        return MicroStats(
            samples=sum(len(part.samples) for part in parts),
            skipped=len(batch) - len(live),
            tokens=sum(int(part.counts.sum()) for part in parts),
            computed=sum(part.input_ids.size for part in parts),
            passes=len(parts),
        )

    def apply_update(self, tokens: int) -> UpdateStats:
        """Update the weights with the accumulated gradient and forget it. Collective, one all-reduce.

        The gradient is that of the mean loss per token, clipped to `learner.clip_norm`. When its norm is not finite,
        the update is skipped and reported. Without any accumulated gradient the gradient is zero, and AdamW moves on
        its momentum as it would have if every zero-advantage sample had been computed.

        Args:
            tokens: sampled tokens of the whole step over all ranks, those of zero-advantage samples included; at
                least 1 and the same on all ranks.
        """
        if tokens < 1:
            raise ValueError(f"an update needs the token count of its step, got {tokens}")
        packet = torch.cat([self._optimizer.squared_norm()[None], self._sums])
        packet = self.ranks.all_sum(packet).cpu()
        trained = TokenSums.from_tensor(packet[1:])
        # FSDP averages over ranks, but the loss is a sum over all of them.
        scale = self.ranks.world / tokens
        norm = math.sqrt(float(packet[0])) * scale
        rate, skipped = self._optimizer.lr, not math.isfinite(norm)
        if skipped:
            logger.warning("update skipped", extra={"grad_norm": norm, "update": self.updates})
            self._optimizer.zero()
        else:
            limit = self.config.learner.clip_norm
            self._optimizer.step(scale * min(1.0, limit / norm) if norm > 0 else scale)
            self._fsdp.reshard()
        self._sums.zero_()
        return UpdateStats(
            update=self.updates, loss=trained.loss / tokens, grad_norm=norm, lr=rate, skipped=skipped, trained=trained
        )

    def update_policy(self, batch: Sequence[TrainSample]) -> tuple[MicroStats, UpdateStats]:
        """One whole step: `accumulate` and `apply_update` with the tokens of all ranks' batches. Collective."""
        stats = self.accumulate(batch)
        count = torch.tensor([sum(len(sample.tokens) for sample in batch)], device=self.ranks.device)
        return stats, self.apply_update(max(1, int(self.ranks.all_sum(count))))

    def to_host(self) -> None:
        """Give the device's memory of weights and moments back; nothing else may be called until `to_device`.

        Gradients of a step in progress stay where they are. Not collective; a repeat does nothing.
        """
        self._fsdp.reshard()
        self._offload.to_host()

    def to_device(self) -> None:
        """Undo `to_host`; whole or not at all when the device has no room. Not collective; a repeat does nothing."""
        self._offload.to_device()

    def discard(self) -> None:
        """Forget the accumulated gradient and its statistics."""
        self._optimizer.zero()
        self._sums.zero_()

    def full_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield Hugging Face name and whole tensor of each parameter, cast to `dtype`, as copies on the CPU.

        Collective: all ranks must go through all items; see `export.full_tensors`.
        """
        if self._whole and self._dtype in (torch.float32, dtype):
            # One gather for all, which the next forward needs anyway.
            self._fsdp.unshard()
            return (
                (name.removeprefix("model."), parameter.detach().to(device="cpu", dtype=dtype, copy=True))
                for name, parameter in self._model.named_parameters()
            )
        return full_tensors(self._parameters, dtype)

    def shard_state(self) -> dict[str, torch.Tensor]:
        """Copies on the CPU of this rank's weights, AdamW moments and update counter, by flat name.

        Copies, so training may go on while they are being written. Not collective.
        """
        return self._optimizer.state()

    def load_shard_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Put back what `shard_state` of the same rank returned, bit for bit; accumulated gradients are forgotten.

        Raises:
            Refused: it is of another model or number of ranks. Nothing is changed.
        """
        self._optimizer.load(tensors)
        self._fsdp.reshard()
        self._sums.zero_()

    def adopt(self, rows: Callable[[str], torch.Tensor]) -> None:
        """Take other weights and begin the moments of AdamW anew; accumulated gradients are forgotten. Not collective.

        Args:
            rows: gives this rank's rows of a parameter by its Hugging Face name.
        """
        self._optimizer.adopt(rows)
        self._fsdp.reshard()
        self._sums.zero_()

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face directory with its tokenizer. Collective; rank 0 writes."""
        tensors = self.full_tensors(self._dtype)
        if self.ranks.rank:
            for _ in tensors:
                pass
            return
        tokenizer = self.config.model.tokenizer or self.config.model.path
        write_model(folder, self._model.model, dict(tensors), tokenizer, self._dtype)

    @property
    def _fsdp(self) -> FSDPModule:
        assert isinstance(self._model, FSDPModule)
        return self._model

    def _agree(self, batch: Sequence[TrainSample]) -> list[Microbatch]:
        """Lay out this rank's batch and fill up to the number of passes of the busiest rank."""
        error = self.misfit(batch)
        parts = [] if error else layout(batch, self._limits)
        passes, refused = self.ranks.all_max(len(parts), int(error is not None))
        if error:
            raise error
        if refused:
            raise StreamrlError("another rank refused its samples", "the log of that rank names the group")
        return parts + [dummy()] * (passes - len(parts))

    def misfit(self, batch: Sequence[TrainSample]) -> ValueError | None:
        """Why samples do not fit the model (unknown token, too long), None when they do. Not collective."""
        if not batch:
            return None
        # One look at all token ids first: it is what every good batch costs.
        ids = np.concatenate([array for sample in batch for array in (sample.prompt, sample.tokens)])
        known = ids.min() >= 0 and ids.max() < self._model.vocabulary
        for sample in batch:
            if sample.width > self._limits.longest:
                return ValueError(f"group {sample.gid}: {sample.width} tokens, the model takes {self._limits.longest}")
            both = () if known else np.concatenate([sample.prompt, sample.tokens])
            if any(token < 0 or token >= self._model.vocabulary for token in both):
                return ValueError(f"group {sample.gid}: a token id is not in the vocabulary of the model")
        return None

    def _forward(self, part: Microbatch, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        plain = not part.shared and not (part.segments == PADDING).any()
        outputs: tuple[torch.Tensor, torch.Tensor | None] = self._model(
            input_ids=self._to_device(part.input_ids),
            segments=None if plain else self._to_device(part.segments),
            position_ids=self._to_device(part.position_ids) if part.shared else None,
            positions=self._to_device(part.positions),
            targets=self._to_device(part.targets),
            entropy=entropy,
        )
        return outputs

    def _backward(self, part: Microbatch) -> None:
        logprobs, _ = self._forward(part)
        if not len(part.samples):
            torch.autograd.backward(logprobs.sum() * 0)
            return
        loss = decoupled_ppo(
            logprobs,
            logprobs.detach(),
            self._to_device(part.behaviour_logprobs),
            self._to_device(part.advantages),
            **self.config.learner.loss.args,
        )
        torch.autograd.backward(loss.per_token.sum())
        self._sums += loss.sums

    def _to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.ranks.device, non_blocking=True)
