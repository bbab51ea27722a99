# The small Vim on scenes of garments with a rule of two samples: Mamba-3's, its weight 1/2.
_base_ = './upernet_vim_fashion.py'

custom_imports = dict(
    imports=['vim_mm', 'studies.discretization.models.backbone'], allow_failed_imports=False
)
model = dict(
    backbone=dict(type='TwoSampleVisionMamba', discretization_method='exp_trapezoidal'),
)
