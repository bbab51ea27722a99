"""Layer-wise learning rates: turns a backbone's layer depths into groups of the optimizer."""

from contextlib import nullcontext

from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from vim_mm.errors import UserTypeError, UserValueError
from vim_mm.models.weight_decay import undecayed_parameters


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Learning rates that shrink towards the input, as in BEiT (arXiv 2106.08254) and Vim.

    The learning rate of depth d out of n is multiplied by ``layer_decay_rate ** (n - 1 - d)``,
    where ``model.backbone.get_layer_depth(name, 'backbone.')`` tells (d, n): heads and necks keep
    the full one. At a rate of 1 any model will do.
    Weights of one dimension (unless ``flat_decay_mult`` says otherwise) and those that a module's
    ``no_weight_decay()`` names (unless ``marked_decay_mult`` does) are not decayed.

    Args:
        optim_wrapper_cfg (dict): As in MMEngine; the optimizer needs a ``lr``.
        paramwise_cfg (dict, optional): ``layer_decay_rate`` (float, 1.0 by default),
            ``marked_decay_mult`` (float, 0.0 by default: what multiplies the weight decay of
            such parameters), and whatever MMEngine's constructor takes; multipliers
            multiply.

    Raises:
        TypeError: The rate is not 1, and the model has no ``backbone`` with ``get_layer_depth``.
        ValueError: The optimizer has no ``lr``, or the rate is not in (0, 1].
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None):
        paramwise_cfg = dict(paramwise_cfg or {})
        self.rate = paramwise_cfg.pop('layer_decay_rate', 1.0)
        self.marked_decay_mult = paramwise_cfg.pop('marked_decay_mult', 0.0)
        paramwise_cfg.setdefault('flat_decay_mult', 0.0)
        super().__init__(optim_wrapper_cfg, paramwise_cfg)
        if self.base_lr is None:
            raise UserValueError("optim_wrapper_cfg['optimizer'] must have a 'lr'")
        if not 0 < self.rate <= 1:
            raise UserValueError(f'layer_decay_rate must lie in (0, 1], got {self.rate}')

    def __call__(self, model: nn.Module) -> OptimWrapper:
        """Build the optimizer of ``model``, which may be wrapped for distributed training."""
        # A shard has one dimension, whatever its parameter has.
        sharded = isinstance(model, FullyShardedDataParallel)
        whole = FullyShardedDataParallel.summon_full_params
        with whole(model, writeback=False) if sharded else nullcontext():
            return super().__call__(model)

    def add_params(self, params: list[dict], module: nn.Module, prefix: str = '', **kwargs) -> None:
        """Fill ``params`` with the groups of ``module``; MMEngine recurses through here."""
        super().add_params(params, module, prefix, **kwargs)
        if prefix:
            return
        backbone = getattr(module, 'backbone', None)
        if self.rate != 1 and not hasattr(backbone, 'get_layer_depth'):
            raise UserTypeError(
                f'{type(module).__name__}.backbone must have get_layer_depth(), '
                f'got {type(backbone).__name__}'
            )
        names = {param: name for name, param in module.named_parameters()}
        undecayed = undecayed_parameters(module)
        merged = {}
        for group in params:
            (param,) = group.pop('params')
            group['lr'] = group.get('lr', self.base_lr)
            if self.rate != 1:
                depth, num_depths = backbone.get_layer_depth(names[param], 'backbone.')
                group['lr'] *= self.rate ** (num_depths - 1 - depth)
            if self.base_wd is not None and param in undecayed:
                decay = group.get('weight_decay', self.base_wd)
                group['weight_decay'] = decay * self.marked_decay_mult
            same = merged.setdefault(tuple(sorted(group.items())), dict(params=[], **group))
            same['params'].append(param)
        params[:] = merged.values()
