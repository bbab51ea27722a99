# A small Vim on the built-in shapes: what `make demo` trains, minutes on two CPU cores.
# Other methods by --cfg-options model.backbone.discretization_method=zoh
_base_ = [
    '../_base_/models/upernet_vim_t.py',
    '../_base_/datasets/shapes_seg.py',
    '../_base_/schedules/ade20k_paper_160k.py',
    '../_base_/seg_runtime.py',
]

model = dict(
    data_preprocessor=dict(size=(128, 128)),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=96, num_layers=4),
        img_size=128,
        patch_size=8,
        out_indices=(0, 1, 2, 3),
        out_feature='residual',
        drop_path_rate=0.0,
        discretization_method='bilinear',
    ),
    # Patches of 8 pixels: strides 4, 8, 16 and 32 again.
    neck=dict(embed_dim=96, rescales=[2, 1, 0.5, 0.25]),
    decode_head=dict(
        in_channels=[96, 96, 96, 96],
        channels=32,
        num_classes=7,
    ),
    auxiliary_head=dict(in_channels=96, channels=32, num_classes=7),
    test_cfg=dict(_delete_=True, mode='whole'),
)
optim_wrapper = dict(optimizer=dict(lr=1e-3, weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-2, by_epoch=False, begin=0, end=50),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False),
]
train_cfg = dict(max_iters=800, val_interval=200)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=200))
