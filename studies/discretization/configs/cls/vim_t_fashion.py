# Vim-Ti's width and depth on Fashion-MNIST, 196 tokens as at 224 / 16, from random weights.
_base_ = [
    '../../../../configs/_base_/models/vim_t.py',
    '../../../../configs/_base_/datasets/fashion_cls.py',
    '../../../../configs/_base_/schedules/fashion_50e.py',
    '../../../../configs/_base_/cls_runtime.py',
]

model = dict(
    # Of the 60,000 training images.
    data_preprocessor=dict(num_classes=10, mean=[72.94] * 3, std=[90.02] * 3),
    backbone=dict(img_size=28, patch_size=2, drop_path_rate=0.1, discretization_method='zoh'),
    head=dict(num_classes=10, topk=(1,)),
    train_cfg=None,
)
