# A small Vim on scenes of garments, 1,024 tokens: the detector of mask_rcnn_vim_shapes.py.
_base_ = [
    '../../../../configs/_base_/models/mask_rcnn_vim_t.py',
    '../_base_/datasets/fashion_det.py',
    '../../../../configs/_base_/schedules/coco_paper_380k.py',
    '../../../../configs/_base_/det_runtime.py',
]

model = dict(
    data_preprocessor=dict(pad_size_divisor=128),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=128, num_layers=6),
        img_size=128,
        patch_size=4,
        out_indices=(5,),
        discretization_method='zoh',
    ),
    # Patches of 4 pixels: strides 1, 2, 4 and 8.
    neck=dict(in_channels=128, out_channels=64, num_outs=4),
    rpn_head=dict(
        in_channels=64,
        feat_channels=64,
        num_convs=1,
        anchor_generator=dict(strides=[1, 2, 4, 8]),
    ),
    roi_head=dict(
        # Garments are 28 to 64 pixels wide: stride 2 from 24 pixels on gives them their 7 bins.
        bbox_roi_extractor=dict(
            roi_layer=dict(sampling_ratio=2),
            out_channels=64,
            featmap_strides=[1, 2, 4, 8],
            finest_scale=12,
        ),
        bbox_head=dict(
            type='Shared2FCBBoxHead',
            in_channels=64,
            fc_out_channels=256,
            num_classes=10,
            reg_class_agnostic=True,
        ),
        mask_roi_extractor=dict(out_channels=64, featmap_strides=[1, 2, 4, 8], finest_scale=12),
        mask_head=dict(num_convs=2, in_channels=64, conv_out_channels=64, num_classes=10),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=400, max_per_img=100),
        rcnn=dict(sampler=dict(num=64, pos_fraction=0.5)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=400, max_per_img=100), rcnn=dict(max_per_img=40)),
)
optim_wrapper = dict(
    paramwise_cfg=dict(layer_decay_rate=1.0),
    optimizer=dict(lr=2e-3, weight_decay=0.05),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-2, by_epoch=False, begin=0, end=200),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False),
]
auto_scale_lr = dict(base_batch_size=8)
train_cfg = dict(max_iters=8000, val_interval=2000)
default_hooks = dict(checkpoint=dict(interval=2000))
