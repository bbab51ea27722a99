"""Which parameters take no weight decay, whatever their dimension.

Modules name them by a method ``no_weight_decay()``, as timm's models do. Nothing is kept on a
parameter: copies, ``load_state_dict(assign=True)`` and ``to_empty`` make new ones.
"""

from torch import nn


def undecayed_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that the modules of a model do not decay.

    Among them are those that other libraries mark by ``_no_weight_decay``, as mamba_ssm does.

    Args:
        model: Any; ``no_weight_decay()`` of a module in it returns names of that module's
            parameters.
    """
    found = {param for param in model.parameters() if getattr(param, '_no_weight_decay', False)}
    for module in model.modules():
        # By the type: wrappers pass on the attributes of what they hold, whose names are others.
        method = getattr(type(module), 'no_weight_decay', None)
        if callable(method):
            own = dict(module.named_parameters())
            # timm's models name what they might have, such as a dist_token.
            found |= {own[name] for name in method(module) if name in own}
    return found
