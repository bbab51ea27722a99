# A small Vim on the built-in shapes: what `make demo-det` trains, minutes on two CPU cores.
# Other methods by --cfg-options model.backbone.discretization_method=zoh
_base_ = [
    '../_base_/models/mask_rcnn_vim_t.py',
    '../_base_/datasets/shapes_det.py',
    '../_base_/schedules/coco_paper_380k.py',
    '../_base_/det_runtime.py',
]

model = dict(
    data_preprocessor=dict(pad_size_divisor=32),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=96, num_layers=4),
        img_size=64,
        patch_size=8,
        out_indices=(3,),
        drop_path_rate=0.0,
        discretization_method='bilinear',
    ),
    # Patches of 8 pixels: strides 2, 4, 8 and 16, for shapes of 20 to 45 pixels.
    neck=dict(in_channels=96, out_channels=48, num_outs=4),
    rpn_head=dict(
        in_channels=48,
        feat_channels=48,
        num_convs=1,
        anchor_generator=dict(strides=[2, 4, 8, 16]),
    ),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=48, featmap_strides=[2, 4, 8, 16], finest_scale=28),
        bbox_head=dict(
            _delete_=True,
            type='Shared2FCBBoxHead',
            in_channels=48,
            fc_out_channels=256,
            roi_feat_size=7,
            num_classes=6,
            bbox_coder=dict(
                type='DeltaXYWHBBoxCoder',
                target_means=[0.0, 0.0, 0.0, 0.0],
                target_stds=[0.1, 0.1, 0.2, 0.2],
            ),
            reg_class_agnostic=True,
            loss_cls=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
            loss_bbox=dict(type='L1Loss', loss_weight=1.0),
        ),
        mask_roi_extractor=dict(out_channels=48, featmap_strides=[2, 4, 8, 16], finest_scale=28),
        mask_head=dict(num_convs=2, in_channels=48, conv_out_channels=48, num_classes=6),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=500, max_per_img=200),
        rcnn=dict(sampler=dict(num=64)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=500, max_per_img=200), rcnn=dict(max_per_img=50)),
)
optim_wrapper = dict(
    paramwise_cfg=dict(layer_decay_rate=1.0),
    optimizer=dict(lr=2e-3, weight_decay=0.05),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-2, by_epoch=False, begin=0, end=100),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False),
]
train_cfg = dict(max_iters=2400, val_interval=400)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=400))
