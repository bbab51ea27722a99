# A small Vim on scenes of garments, 1,024 tokens.
_base_ = [
    '../../../../configs/_base_/models/upernet_vim_t.py',
    '../_base_/datasets/fashion_seg.py',
    '../../../../configs/_base_/schedules/ade20k_paper_160k.py',
    '../../../../configs/_base_/seg_runtime.py',
]

model = dict(
    data_preprocessor=dict(size=(128, 128), test_cfg=dict(size=(128, 128))),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=128, num_layers=6),
        img_size=128,
        patch_size=4,
        out_indices=(1, 3, 4, 5),
        discretization_method='zoh',
    ),
    # Patches of 4 pixels: strides 2, 4, 8 and 16.
    neck=dict(embed_dim=128, rescales=[2, 1, 0.5, 0.25]),
    decode_head=dict(in_channels=[128, 128, 128, 128], channels=64, num_classes=11),
    auxiliary_head=dict(in_channels=128, channels=64, num_classes=11),
    test_cfg=dict(_delete_=True, mode='whole'),
)
optim_wrapper = dict(optimizer=dict(lr=2e-3, weight_decay=0.05), clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-2, by_epoch=False, begin=0, end=200),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False),
]
auto_scale_lr = dict(base_batch_size=16)
train_cfg = dict(max_iters=8000, val_interval=2000)
default_hooks = dict(checkpoint=dict(interval=2000))
