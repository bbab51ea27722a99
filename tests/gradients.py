"""Whether every parameter takes part in every backward pass.

Where one does not, DistributedDataParallel waits for its gradient in vain, unless the config has
``find_unused_parameters``.
"""

from functools import partial

from mmengine.hooks import Hook
from torch import nn


class Gradients:
    """Watches the parameters of a model that are trained."""

    def __init__(self, model: nn.Module):
        self.names = {name for name, p in model.named_parameters() if p.requires_grad}
        self.seen = set()
        for name, param in model.named_parameters():
            if param.requires_grad:
                note = partial(self._note, name)
                param.register_post_accumulate_grad_hook(note)  # where that wrapper listens, too

    def _note(self, name: str, _) -> None:
        self.seen.add(name)

    def lacking(self) -> list[str]:
        """Who got no gradient since the last call."""
        lacking = sorted(self.names - self.seen)
        self.seen.clear()
        return lacking


class GradientsHook(Hook):
    """Collects in ``lacking`` for each backward pass of a training who got no gradient."""

    def before_train(self, runner) -> None:
        """Look after each pass of a step, of which there are several where gradients accumulate."""
        gradients, wrapper = Gradients(runner.model), runner.optim_wrapper
        backward, self.lacking = wrapper.backward, []

        def checked(*args, **kwargs):
            backward(*args, **kwargs)
            self.lacking.append(gradients.lacking())

        wrapper.backward = checked
