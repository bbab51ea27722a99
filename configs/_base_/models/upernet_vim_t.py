# UPerNet on Vim-Ti (arXiv 2401.09417, table 2): four taps of one resolution, which
# Feature2Pyramid rescales to strides 4, 8, 16 and 32. The widths of the heads follow the
# backbone's, as in Vim's released segmentation. The Fast types give MMSegmentation's results in
# less time and memory, see docs/faster_training.md.
model = dict(
    type='FastEncoderDecoder',
    data_preprocessor=dict(
        type='FastSegDataPreProcessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
        size=(512, 512),
    ),
    backbone=dict(
        type='VisionMamba',
        arch='tiny',
        img_size=512,
        out_indices=(5, 11, 17, 23),
        out_feature='mixer',
        drop_path_rate=0.1,
    ),
    neck=dict(type='Feature2Pyramid', embed_dim=192, rescales=[4, 2, 1, 0.5]),
    decode_head=dict(
        type='FastUPerHead',
        in_channels=[192, 192, 192, 192],
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=192,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=dict(type='SyncBN', requires_grad=True),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    ),
    auxiliary_head=dict(
        type='FastFCNHead',
        in_channels=192,
        in_index=2,
        channels=256,
        num_convs=1,
        concat_input=False,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=dict(type='SyncBN', requires_grad=True),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=0.4),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='slide', crop_size=(512, 512), stride=(341, 341)),
)
