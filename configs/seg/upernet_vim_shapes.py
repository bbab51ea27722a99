# A small Vim on the built-in shapes: what `make demo` trains, minutes on two CPU cores.
# Other methods by --cfg-options model.backbone.discretization_method=zoh
_base_ = [
    '../_base_/models/upernet_vim_t.py',
    '../_base_/datasets/shapes_seg.py',
    '../_base_/schedules/ade20k_paper_160k.py',
    '../_base_/seg_runtime.py',
]

model = dict(
    # Tested at the size of training: padding takes part in the scan, and is cut off the result.
    data_preprocessor=dict(size=(64, 64), test_cfg=dict(size=(64, 64))),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=96, num_layers=4),
        img_size=64,
        patch_size=4,
        out_indices=(0, 1, 2, 3),
        drop_path_rate=0.0,
        discretization_method='bilinear',
    ),
    # Patches of 4 pixels: strides 2, 4, 8 and 16.
    neck=dict(embed_dim=96, rescales=[2, 1, 0.5, 0.25]),
    # No label is ignored, so the mean is the same; MMSegmentation warns where nothing is said.
    decode_head=dict(
        in_channels=[96, 96, 96, 96],
        channels=32,
        num_classes=7,
        loss_decode=dict(avg_non_ignore=True),
    ),
    auxiliary_head=dict(
        in_channels=96, channels=32, num_classes=7, loss_decode=dict(avg_non_ignore=True)
    ),
    test_cfg=dict(_delete_=True, mode='whole'),
)
optim_wrapper = dict(
    optimizer=dict(lr=4e-3, weight_decay=0.05),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-2, by_epoch=False, begin=0, end=50),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False),
]
auto_scale_lr = dict(base_batch_size=8)
train_cfg = dict(max_iters=900, val_interval=180)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=180))
