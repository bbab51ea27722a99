# RetinaNet on Vim-Ti: SimpleFPN from stride 8 on, MMDetection's head.
_base_ = 'mmdet::_base_/models/retinanet_r50_fpn.py'

model = dict(
    # To 1024x1024 always: padding takes part in the scan, so testing pads as training does.
    data_preprocessor=dict(pad_size_divisor=1024, non_blocking=True),
    backbone=dict(
        _delete_=True,
        type='VisionMamba',
        arch='tiny',
        img_size=1024,
        out_indices=(23,),
        out_feature='residual',
        drop_path_rate=0.1,
    ),
    neck=dict(
        _delete_=True,
        type='SimpleFPN',
        in_channels=192,
        out_channels=256,
        num_outs=5,
        start_level=1,
    ),
)
