# A small Vim on the built-in shapes: what `make demo-det` trains, minutes on two CPU cores.
# Other methods by --cfg-options model.backbone.discretization_method=zoh
_base_ = [
    '../_base_/models/mask_rcnn_vim_t.py',
    '../_base_/datasets/shapes_det.py',
    '../_base_/schedules/coco_paper_380k.py',
    '../_base_/det_runtime.py',
]

model = dict(
    # To 64x64 always: padding takes part in the scan, so testing pads as training does.
    data_preprocessor=dict(pad_size_divisor=64),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=96, num_layers=4),
        img_size=64,
        patch_size=4,
        out_indices=(3,),
        drop_path_rate=0.0,
        discretization_method='bilinear',
    ),
    # Patches of 4 pixels: strides 1, 2, 4 and 8.
    neck=dict(in_channels=96, out_channels=32, num_outs=4),
    rpn_head=dict(
        in_channels=32,
        feat_channels=32,
        num_convs=1,
        anchor_generator=dict(strides=[1, 2, 4, 8]),
    ),
    roi_head=dict(
        # Shapes are 20 to 46 pixels wide: stride 2 from 24 pixels on gives them their 7 bins.
        bbox_roi_extractor=dict(
            roi_layer=dict(sampling_ratio=2),
            out_channels=32,
            featmap_strides=[1, 2, 4, 8],
            finest_scale=12,
        ),
        bbox_head=dict(
            type='Shared2FCBBoxHead',
            in_channels=32,
            fc_out_channels=256,
            num_classes=6,
            reg_class_agnostic=True,
        ),
        mask_roi_extractor=dict(out_channels=32, featmap_strides=[1, 2, 4, 8], finest_scale=12),
        mask_head=dict(num_convs=1, in_channels=32, conv_out_channels=32, num_classes=6),
    ),
    # Images hold three shapes at most: few proposals, half of them on shapes.
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=200, max_per_img=60),
        rcnn=dict(sampler=dict(num=32, pos_fraction=0.5)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=200, max_per_img=60), rcnn=dict(max_per_img=20)),
)
optim_wrapper = dict(
    paramwise_cfg=dict(layer_decay_rate=1.0),
    optimizer=dict(lr=4e-3, weight_decay=0.05),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-2, by_epoch=False, begin=0, end=100),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False),
]
auto_scale_lr = dict(base_batch_size=8)
train_cfg = dict(max_iters=900, val_interval=180)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=180))
