# Cascade Mask R-CNN on Vim-Ti after ViTDet (arXiv 2203.16527), as mask_rcnn_vim_t.py, with a box
# head per stage.
_base_ = 'mmdet::_base_/models/cascade-mask-rcnn_r50_fpn.py'

model = dict(
    type='FastDetector',
    of='CascadeRCNN',
    # To 1024x1024 always: padding takes part in the scan, so testing pads as training does.
    data_preprocessor=dict(
        type='FastDetDataPreprocessor', pad_size_divisor=1024, non_blocking=True
    ),
    backbone=dict(
        _delete_=True,
        type='VisionMamba',
        arch='tiny',
        img_size=1024,
        out_indices=(23,),
        out_feature='residual',
        drop_path_rate=0.1,
    ),
    neck=dict(_delete_=True, type='SimpleFPN', in_channels=192, out_channels=256, num_outs=5),
    rpn_head=dict(num_convs=2),
    roi_head=dict(
        # A list replaces the base's as a whole, so the unchanged settings are repeated.
        bbox_head=[
            dict(
                type='Shared4Conv1FCBBoxHead',
                in_channels=256,
                conv_out_channels=256,
                fc_out_channels=1024,
                roi_feat_size=7,
                num_classes=80,
                norm_cfg=dict(type='timm.layers.LayerNorm2d'),
                bbox_coder=dict(
                    type='DeltaXYWHBBoxCoder',
                    target_means=[0.0, 0.0, 0.0, 0.0],
                    target_stds=target_stds,
                ),
                reg_class_agnostic=True,
                loss_cls=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
                loss_bbox=dict(type='SmoothL1Loss', beta=1.0, loss_weight=1.0),
            )
            for target_stds in (
                [0.1, 0.1, 0.2, 0.2],
                [0.05, 0.05, 0.1, 0.1],
                [0.033, 0.033, 0.067, 0.067],
            )
        ],
        mask_head=dict(norm_cfg=dict(type='timm.layers.LayerNorm2d')),
    ),
)
