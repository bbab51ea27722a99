# Cascade Mask R-CNN on Vim-Ti with the switches of the released detector (hustvl/Vim at dd0358a,
# det/configs/common/models/mask_rcnn_vimdet.py): a backbone that turns the residual stream and sums
# its directions, and detectron2's losses, samples and proposals.
_base_ = './cascade_mask_rcnn_vim_t.py'

model = dict(
    backbone=dict(
        if_divide_out=False,
        if_rope=True,
        if_rope_residual=True,
        rope_grid=14,
        residual_in_fp32=True,
    ),
    rpn_head=dict(loss_bbox=dict(_delete_=True, type='L1Loss', loss_weight=1.0)),
    roi_head=dict(
        _delete_=True,
        type='SharedMaskCascadeRoIHead',
        num_stages=3,
        bbox_roi_extractor=dict(
            type='SingleRoIExtractor',
            roi_layer=dict(type='RoIAlign', output_size=7, sampling_ratio=0),
            out_channels=256,
            featmap_strides=[4, 8, 16, 32],
        ),
        bbox_head=[
            dict(
                type='Shared4Conv1FCBBoxHead',
                in_channels=256,
                conv_out_channels=256,
                fc_out_channels=1024,
                roi_feat_size=7,
                num_classes=80,
                norm_cfg=dict(type='timm.layers.LayerNorm2d', eps=1e-6),
                bbox_coder=dict(
                    type='DeltaXYWHBBoxCoder',
                    target_means=[0.0, 0.0, 0.0, 0.0],
                    target_stds=[1 / xy, 1 / xy, 1 / wh, 1 / wh],
                ),
                reg_class_agnostic=True,
                loss_cls=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
                loss_bbox=dict(type='L1Loss', loss_weight=1.0),
            )
            for xy, wh in ((10, 5), (20, 10), (30, 15))
        ],
        mask_roi_extractor=dict(
            type='SingleRoIExtractor',
            roi_layer=dict(type='RoIAlign', output_size=14, sampling_ratio=0),
            out_channels=256,
            featmap_strides=[4, 8, 16, 32],
        ),
        mask_head=dict(
            type='FCNMaskHead',
            num_convs=4,
            in_channels=256,
            conv_out_channels=256,
            num_classes=80,
            norm_cfg=dict(type='timm.layers.LayerNorm2d', eps=1e-6),
            loss_mask=dict(type='CrossEntropyLoss', use_mask=True, loss_weight=1.0),
        ),
    ),
    train_cfg=dict(
        # Anchors may leave the picture, and the best anchor of a box is positive however small the
        # overlap.
        rpn=dict(assigner=dict(min_pos_iou=0.0), allowed_border=-1),
        rpn_proposal=dict(nms_pre=2000, max_per_img=1000),
    ),
)
