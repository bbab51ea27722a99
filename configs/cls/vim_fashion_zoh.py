# A small Vim on Fashion-MNIST, 49 tokens, one epoch: what `make demo-real` trains, minutes on two
# CPU cores.
_base_ = './vim_t_fashion_zoh.py'

model = dict(
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=64, num_layers=4), patch_size=4, drop_path_rate=0.0
    ),
    head=dict(in_channels=64, loss=dict(_delete_=True, type='CrossEntropyLoss')),
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
