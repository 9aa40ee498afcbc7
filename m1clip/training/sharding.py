"""Weights, gradients and optimizer state divided among the ranks with FSDP2 (`fully_shard`).

Towers are divided by rows and gathered block by block while a step needs them; heads and
temperature are complete on every rank. The optimizers see the rows of this rank as ordinary
tensors.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from m1clip.errors import UserError, first_line
from m1clip.hardware.device import Precision
from m1clip.model.clip import CLIP
from m1clip.model.layers import Block
from m1clip.model.towers import TextTower, VisionTower
from m1clip.training.distributed import Ranks, rows_of_rank
from m1clip.training.oom import is_out_of_memory

# Our blocks return views; nothing writes to them in place.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")


class Shards:
    """The sharded parameters of a model; `local` has the rows of this rank by parameter name."""

    def __init__(
        self, model: CLIP, ranks: Ranks, device: torch.device, precision: Precision
    ) -> None:
        self.ranks = ranks
        assert dist.group.WORLD is not None
        self.mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
        for tower in (model.image_tower, model.text_tower):
            if any(p.requires_grad for p in tower.parameters()):
                # Third-party towers may not take parameters in bf16; autocast converts them where
                # it is safe.
                own = isinstance(tower, VisionTower | TextTower)
                self._shard(tower, torch.bfloat16 if precision == "bf16" and own else None)
        model.to(device)
        self._parameters = {
            name: p for name, p in model.named_parameters() if isinstance(p, DTensor)
        }
        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        self.local = {name: p.to_local().detach().requires_grad_() for name, p in trained.items()}
        self.full_rows = {id(self.local[name]): len(p) for name, p in trained.items()}

    def _shard(self, tower: nn.Module, dtype: torch.dtype | None) -> None:
        reduce_dtype = None if dtype is None else torch.float32
        policy = MixedPrecisionPolicy(dtype, reduce_dtype, cast_forward_inputs=False)
        lists = [module for module in tower.modules() if isinstance(module, nn.ModuleList)]
        blocks = [
            child
            for module_list in lists
            for child in module_list
            if any(True for _ in child.children())
        ]
        for module in [*blocks, tower]:
            fully_shard(module, mesh=self.mesh, mp_policy=policy, reshard_after_forward=True)
            assert isinstance(module, FSDPModule)
            # The sum: the loss of a rank is a part of the loss of the batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support averages
            if isinstance(module, Block):
                for name in ("at", "mean"):
                    register_fsdp_forward_method(module, name)

    def take_gradients(self) -> None:
        """Move the gradients of the model to the rows that the optimizers see."""
        for name, rows in self.local.items():
            p = self._parameters[name]
            rows.grad, p.grad = p.grad.to_local() if isinstance(p.grad, DTensor) else None, None

    def drop_gradients(self) -> None:
        for p in self._parameters.values():
            p.grad = None

    def total_norm(self, complete: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients; `complete` are those that every rank has."""
        own = torch.nn.utils.get_total_norm(
            [rows.grad for rows in self.local.values() if rows.grad is not None]
        )
        squared = (own**2).reshape(1)
        self.ranks.all_reduce([squared])
        return (squared[0] + torch.nn.utils.get_total_norm(complete) ** 2).sqrt()

    def complete(
        self, tensors: Mapping[str, Tensor], on_all_ranks: bool = False
    ) -> dict[str, Tensor]:
        """Weights or optimizer state with all rows, on the CPU.

        {} on all ranks but 0, unless `on_all_ranks`.

        Keys are names of parameters, or part/name/key.
        """
        complete_tensors = {}
        for key, tensor in tensors.items():
            rows = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            sharded = rows is not tensor or (_name(key) in self.local and rows.ndim > 0)
            whole = self.ranks.concatenate_rows(rows) if sharded else rows
            if on_all_ranks or self.ranks.rank == 0:
                complete_tensors[key] = whole.detach().cpu()
        return complete_tensors

    def own_rows(self, key: str, tensor: Tensor) -> Tensor:
        """This rank's rows of a complete tensor, as a DTensor with the shape of the
        complete one.
        """
        if _name(key) not in self._parameters or not tensor.ndim or isinstance(tensor, DTensor):
            return tensor
        rows = tensor[rows_of_rank(len(tensor), self.ranks.rank, self.ranks.size)].to(
            self.mesh.device_type
        )
        placed = (self.mesh, [Shard(0)])
        return DTensor.from_local(
            rows.clone(), *placed, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def local_rows(self, key: str, tensor: Tensor) -> Tensor:
        """This rank's rows of a complete tensor, as an ordinary tensor."""
        rows = self.own_rows(key, tensor)
        return rows.to_local() if isinstance(rows, DTensor) else rows

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Report a lost rank, or a lack of memory, which one rank cannot handle while the others
        exchange weights.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise UserError(
                    f"rank {self.ranks.rank}: out of memory ({first_line(error)}); with --fsdp on a"
                    " step cannot be repeated: use --micro-batch, --grad-checkpointing or more"
                    " ranks"
                ) from None
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise self.ranks.lost(error) from None
            raise


def _name(key: str) -> str:
    """The parameter name in a key: in part/name/key, or the key itself."""
    return key.split("/")[1] if "/" in key else key
