# Ocean, humid, arid and polar land in satellite images: the small trained model that ships, see
# demo/README.md. Minutes on two CPU cores.
_base_ = [
    '../_base_/models/upernet_vim_t.py',
    '../_base_/datasets/earth_seg.py',
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
        drop_path_rate=0.0,
        discretization_method='zoh',
    ),
    # Patches of 8 pixels: strides 4, 8, 16 and 32.
    neck=dict(embed_dim=96, rescales=[2, 1, 0.5, 0.25]),
    decode_head=dict(in_channels=[96, 96, 96, 96], channels=32, num_classes=4),
    auxiliary_head=dict(in_channels=96, channels=32, num_classes=4),
    test_cfg=dict(crop_size=(128, 128), stride=(86, 86)),
)
optim_wrapper = dict(optimizer=dict(lr=3e-3, weight_decay=0.05), clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-2, by_epoch=False, begin=0, end=50),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False),
]
auto_scale_lr = dict(base_batch_size=8)
train_cfg = dict(max_iters=300, val_interval=300)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=100))
