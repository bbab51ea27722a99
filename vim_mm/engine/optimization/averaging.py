"""A moving average of the weights that nobody uses, as Vim's training on ImageNet keeps it."""

from mmengine.hooks import EMAHook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from mmengine.runner.checkpoint import load_state_dict


@HOOKS.register_module()
class SideEMAHook(EMAHook):
    """Keeps the average beside the weights, which are what is tested and saved as the model.

    Checkpoints hold it as ``ema_state_dict``. MMEngine's EMAHook tests the average, and saves it
    as the model. Takes that hook's arguments; its ``momentum`` is 1 less timm's ``decay``.
    """

    def before_val_epoch(self, runner: Runner) -> None:
        """Validate the weights themselves."""

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Nothing was exchanged."""

    before_test_epoch = before_val_epoch
    after_test_epoch = after_val_epoch

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Add the average to the checkpoint."""
        checkpoint['ema_state_dict'] = self.ema_model.state_dict()

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Take the average of a checkpoint that is resumed, else start from its weights.

        Raises:
            RuntimeError: The average that is to be resumed is of another model, or not whole.
        """
        if runner._resume and 'ema_state_dict' in checkpoint:
            self.ema_model.load_state_dict(checkpoint['ema_state_dict'])
        else:  # MMEngine's function leaves out weights of another shape, as of a head
            weights = checkpoint['state_dict']
            load_state_dict(self.ema_model.module, weights, strict=self.strict_load)
