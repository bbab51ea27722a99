# A small Vim on Fashion-MNIST, 49 tokens, one epoch: what `make demo-real` trains, minutes on two
# CPU cores.
_base_ = [
    '../_base_/models/vim_t.py',
    '../_base_/datasets/fashion_cls.py',
    '../_base_/schedules/fashion_50e.py',
    '../_base_/cls_runtime.py',
]

model = dict(
    # Of the 60,000 training images.
    data_preprocessor=dict(num_classes=10, mean=[72.94] * 3, std=[90.02] * 3),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=64, num_layers=4),
        img_size=28,
        patch_size=4,
        drop_path_rate=0.0,
        discretization_method='zoh',
    ),
    head=dict(
        in_channels=64,
        num_classes=10,
        topk=(1,),
        loss=dict(_delete_=True, type='CrossEntropyLoss'),
    ),
    train_cfg=None,
)
train_dataloader = dict(
    batch_size=64,
    num_workers=1,
    dataset=dict(
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='RandomFlip', prob=0.5),
            dict(type='PackInputs'),
        ]
    ),
)
optim_wrapper = dict(optimizer=dict(lr=4e-3))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-2, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', eta_min=0.0, by_epoch=False),
]
train_cfg = dict(max_iters=936, val_interval=468)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=468))
auto_scale_lr = dict(base_batch_size=64)
