"""The backbone with a rule of two samples, as configs build it."""

from typing import Any

from mmengine.registry import MODELS

from studies.discretization.models.arms import StudyMamba
from studies.discretization.models.two_sample import check_rule
from vim_mm.models.arguments import check_choice
from vim_mm.registered import VisionMamba


@MODELS.register_module()
class TwoSampleVisionMamba(VisionMamba):
    """``VisionMamba`` whose mixers scan by a rule of two samples, in the plain block.

    The other arguments, and the weights that there are without a learned weight of the rule, are
    those of VisionMamba. Checkpoints note the rule in the place of the method.

    Args:
        discretization_method (str): 'exp_trapezoidal' or 'foh_two_sample', see ``two_sample.py``.
        weight (str): Of exp_trapezoidal: 'half', or what learns one, 'channel' or 'token'.

    Raises:
        ValueError: An unknown rule, or a weight that it does not have.
    """

    def __init__(self, *args: Any, discretization_method: str, weight: str = 'half', **kwargs: Any):
        check_choice('weight', weight, ('half', 'channel', 'token'))
        check_rule(discretization_method, 0.5 if weight == 'half' else 0.0)
        super().__init__(*args, **kwargs)
        for layer in self.layers:
            mixer = layer.mixer
            mixer.__class__ = StudyMamba
            mixer.rule = mixer.discretization_method = discretization_method
            mixer.may_fuse = False
            if weight != 'half':
                mixer.learn_weight(weight)
