# UPerNet on Vim-Ti as hustvl/Vim released it (41.0 mIoU); see seg/README.md.
_base_ = [
    '../_base_/models/upernet_vim_t.py',
    '../_base_/datasets/ade20k_512x512.py',
    '../_base_/schedules/ade20k_released_60k.py',
    '../_base_/seg_runtime.py',
]

model = dict(backbone=dict(residual_in_fp32=False, discretization_method='zoh'))
