# Vim-Ti as hustvl/Vim released it, instead of the paper's recipe; see seg/README.md.
_base_ = [
    '../_base_/models/upernet_vim_t.py',
    '../_base_/datasets/ade20k_512x512.py',
    '../_base_/schedules/ade20k_released_60k.py',
    '../_base_/seg_runtime.py',
]

model = dict(backbone=dict(discretization_method='zoh'))
# 4 GPUs x 8 images = the released script's 32.
train_dataloader = dict(batch_size=8)
