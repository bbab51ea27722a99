# Climate zones from satellite images: the small trained model that ships, see demo/README.md.
_base_ = [
    '../_base_/models/upernet_vim_t.py',
    '../_base_/datasets/earth_seg.py',
    '../_base_/schedules/ade20k_paper_160k.py',
    '../_base_/seg_runtime.py',
]

model = dict(
    data_preprocessor=dict(size=(256, 256)),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=128, num_layers=8),
        img_size=256,
        patch_size=8,
        out_indices=(1, 3, 5, 7),
        drop_path_rate=0.1,
        discretization_method='zoh',
    ),
    # Patches of 8 pixels: strides 4, 8, 16 and 32.
    neck=dict(embed_dim=128, rescales=[2, 1, 0.5, 0.25]),
    decode_head=dict(in_channels=[128, 128, 128, 128], channels=64, num_classes=4),
    auxiliary_head=dict(in_channels=128, channels=64, num_classes=4),
    test_cfg=dict(crop_size=(256, 256), stride=(128, 128)),
)
optim_wrapper = dict(optimizer=dict(lr=1e-3, weight_decay=0.05), clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-2, by_epoch=False, begin=0, end=200),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False),
]
auto_scale_lr = dict(base_batch_size=16)
train_cfg = dict(max_iters=1500, val_interval=500)
default_hooks = dict(logger=dict(interval=50), checkpoint=dict(interval=500))
