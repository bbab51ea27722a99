"""Training in several processes with one exchange of gradients a step, after the backward pass.

``DistributedDataParallel`` exchanges them in parts while the backward pass goes on, by hooks on the
parameters. A CUDA graph of the step cannot hold these hooks: they tie each gradient to the stream
that was current when the model was wrapped.
"""

from collections.abc import Iterable
from typing import Any

import torch
from mmengine.dist import broadcast, get_world_size
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.registry import MODEL_WRAPPERS
from torch import Tensor, distributed, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from vim_mm.errors import UserRuntimeError


def forward_backward(model: BaseModel, batch: Any, wrapper: OptimWrapper) -> dict[str, Tensor]:
    """``BaseModel.train_step`` between the preparation of the batch and the optimizer's step.

    Returns:
        dict: What is logged, by name.
    """
    with wrapper.optim_context(model):
        losses = model._run_forward(batch, mode='loss')
    loss, values = model.parse_losses(losses)
    wrapper.backward(wrapper.scale_loss(loss))
    return values


@MODEL_WRAPPERS.register_module()
class FlatDataParallel(nn.Module):
    """A model whose processes average their gradients, in one flat tensor, before each step.

    Gradients that a step accumulates are exchanged once. Running statistics stay those of each
    process, as with MMEngine's ``DistributedDataParallel``.

    Args:
        module (BaseModel): On its device. It gets the parameters and buffers of process 0.
    """

    def __init__(self, module: BaseModel):
        super().__init__()
        self.module = module
        self.processes = get_world_size()
        if self.processes == 1:
            return
        self.hosts = distributed.new_group(backend='gloo')  # answers without the GPU
        for tensor in (*module.parameters(), *module.buffers()):
            # Of a parameter that is channels last MMEngine makes a tensor, and wants its type back.
            broadcast(tensor.detach())

    def all_agree(self, yes: bool) -> bool:
        """Whether every process says yes. Each must ask; the host waits for the others."""
        if self.processes == 1:
            return yes
        answer = torch.tensor(int(yes))
        distributed.all_reduce(answer, distributed.ReduceOp.MIN, self.hosts)
        return bool(answer)

    def average_gradients(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Give the parameters the mean of their gradients over all processes.

        Args:
            params (Iterable): Those of the module, of a caller that has them; else they are looked
                for in all its modules.

        Raises:
            RuntimeError: A parameter that is trained has no gradient. Other processes may have one.
        """
        by_dtype: dict[torch.dtype | None, list[Tensor]] = {}
        for param in self.module.parameters() if params is None else params:
            if param.requires_grad:
                grad = param.grad
                by_dtype.setdefault(None if grad is None else grad.dtype, []).append(grad)
        if None in by_dtype:
            named = self.module.named_parameters()
            missing = [name for name, p in named if p.requires_grad and p.grad is None]
            raise UserRuntimeError(
                f'{len(missing)} parameters got no gradient, the first of them {missing[0]}: in '
                'several processes every parameter must take part in the loss, or be frozen'
            )
        if self.processes == 1:
            return
        for grads in by_dtype.values():
            flat = _flatten_dense_tensors(grads)
            # The order of DistributedDataParallel, whose bits these are on two processes.
            distributed.all_reduce(flat.div_(self.processes))
            # One launch for many, as the optimizers do it; PyTorch has no public name for it.
            torch._foreach_copy_(grads, _unflatten_dense_tensors(flat, grads))

    def train_step(self, data: dict | tuple | list, optim_wrapper: OptimWrapper) -> dict:
        """As in ``BaseModel``: one batch, and the optimizer's step if it is due."""
        with optim_wrapper.optim_context(self.module):
            batch = self.module.data_preprocessor(data, True)
        values = forward_backward(self.module, batch, optim_wrapper)
        if optim_wrapper.should_update():
            self.average_gradients()
            optim_wrapper.step()
            optim_wrapper.zero_grad()
        return values

    def val_step(self, data: dict | tuple | list) -> list:
        """The module's."""
        return self.module.val_step(data)

    def test_step(self, data: dict | tuple | list) -> list:
        """The module's."""
        return self.module.test_step(data)

    def forward(self, *args, **kwargs) -> dict[str, Tensor] | list | Tensor:
        """The module's."""
        return self.module(*args, **kwargs)
