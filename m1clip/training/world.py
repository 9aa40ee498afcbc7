"""The second seam of a training step: what the ranks of a run exchange. With one process, nothing.

The batch is global: each rank encodes its rows of it, features are gathered, each rank computes the
loss of its rows against all features, and gradients are summed. Every rank then makes the same
update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor

from m1clip.data.loader import Batch
from m1clip.model.clip import CLIP
from m1clip.training.distributed import GradientExchange, JointBatch, Ranks, Sizes
from m1clip.training.encode import EncodedBatch, Mark, ignore_mark

if TYPE_CHECKING:  # a heavy import
    from m1clip.training.sharding import Shards


class World:
    """The ranks that train one model, as a training step sees them."""

    def __init__(self, ranks: Ranks, model: CLIP, shards: Shards | None = None) -> None:
        self.ranks = ranks
        self.shards = shards  # weights divided among the ranks
        self.exchange: GradientExchange | None = None  # sums gradients during the backward pass
        local = {} if shards is None else shards.local
        # Parameters that every rank has completely, and all that this rank updates.
        self.complete_parameters: list[Tensor] = [
            p for name, p in model.named_parameters() if name not in local
        ]
        self.parameters = [*self.complete_parameters, *local.values()]
        self._summed_later: list[Tensor] = self.complete_parameters
        if ranks.size > 1 and shards is None:
            towers = (model.text_tower, model.text_head, model.image_tower, model.image_head)
            encoders = [p for part in towers for p in part.parameters() if p.requires_grad]
            self.exchange = GradientExchange(ranks, encoders[::-1])
            self._summed_later = [p for p in (model.logit_scale, model.logit_bias) if p is not None]

    @property
    def is_single(self) -> bool:
        return self.ranks.size == 1

    def chunk_size(self, micro_batch: int, rows: int) -> int:
        """Images to encode at a time, the same choice on all ranks; 0: the whole batch at once."""
        most_rows = rows if self.shards is None else self.ranks.all_reduce_max(rows)[0]
        return micro_batch if 0 < micro_batch < most_rows else 0

    def most_calls(self, calls: list[int]) -> list[int]:
        """The calls of each tower that every rank makes: with sharded weights, all ranks call
        equally often.
        """
        return calls if self.shards is None else self.ranks.all_reduce_max(*calls)

    @contextmanager
    def synchronized(self, *facts: int, mark: Mark = ignore_mark) -> Iterator[Sizes]:
        """Run a block that may run out of memory: if it does on one rank, all raise.

        Yields a list, which has the `facts` of every rank when the block ends.
        """
        if self.is_single:
            yield [list(facts)]
            return
        watched = nullcontext() if self.shards is None else self.shards.watched()
        with self.ranks.synchronized(*facts) as sizes, watched:
            try:
                yield sizes
            finally:
                mark("exchange")  # waiting for slower ranks

    def gather(self, batch: Batch, features: Sequence[Tensor], sizes: Sizes) -> JointBatch:
        """The detached features and ids of all ranks; on one process, its own."""
        return self.ranks.all_gather(batch, features, sizes)

    def scatter(self, gradients: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        """This rank's rows of the gradients of all features, summed over the ranks."""
        return self.ranks.reduce_scatter(gradients, sizes)

    def backward(self, encoded: EncodedBatch, gradients: Sequence[Tensor]) -> None:
        """Backpropagate.

        Gradients of parameters are sent to the other ranks as soon as they are complete.
        """
        if self.exchange is None:
            encoded.backward(gradients, lambda is_last: None)
            return
        with self.exchange.during():
            encoded.backward(gradients, self.exchange.before_pass)

    def reduce(self, *figures: Tensor) -> tuple[Tensor, ...]:
        """Wait for the sums of all gradients.

        Returns the sums of some figures over the ranks, such as the loss.
        """
        if self.shards is not None:
            self.shards.take_gradients()
        if self.exchange is not None:
            self.exchange.finish()
        if not self.is_single:
            self.ranks.all_reduce(
                [*figures, *(p.grad for p in self._summed_later if p.grad is not None)]
            )
        return figures

    def drop_gradients(self) -> None:
        """Forget the gradients of a step that is repeated."""
        if self.shards is not None:
            self.shards.drop_gradients()
        if self.exchange is not None:
            self.exchange.finish()  # nothing is left to add to
