# Mask R-CNN on Vim-Ti after ViTDet (arXiv 2203.16527): a simple pyramid over the last layer, two
# convolutions in the RPN, four in the box head, layer norm everywhere.
_base_ = 'mmdet::_base_/models/mask-rcnn_r50_fpn.py'

model = dict(
    type='FastDetector',
    of='MaskRCNN',
    # To 1024x1024 always: padding takes part in the scan, so testing pads as training does.
    # The next batch is copied while the step before it still runs: the loader pins its memory.
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
        bbox_head=dict(
            type='Shared4Conv1FCBBoxHead',
            conv_out_channels=256,
            norm_cfg=dict(type='timm.layers.LayerNorm2d'),
        ),
        mask_head=dict(norm_cfg=dict(type='timm.layers.LayerNorm2d')),
    ),
)
