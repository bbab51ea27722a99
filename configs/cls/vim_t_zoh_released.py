# Vim-Ti on ImageNet as hustvl/Vim released it (76.1 top-1, vim/scripts/pt-vim-t.sh); see
# docs/classification.md.
_base_ = [
    '../_base_/models/vim_t.py',
    '../_base_/datasets/imagenet_224.py',
    '../_base_/schedules/imagenet_released_300e.py',
    '../_base_/cls_runtime.py',
]

model = dict(backbone=dict(drop_path_rate=0.0, discretization_method='zoh'))
default_hooks = dict(checkpoint=dict(interval=1251, save_best='accuracy/top1'))
