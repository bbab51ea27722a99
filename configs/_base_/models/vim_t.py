# Vim-Ti as a classifier (arXiv 2401.09417): the class token in the middle of the sequence, behind
# the last norm. Mean pooling: cls_token='none', out_type='avg_featmap'.
model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        type='ClsDataPreprocessor',
        num_classes=1000,
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        to_rgb=True,
    ),
    backbone=dict(
        type='VisionMamba',
        arch='tiny',
        img_size=224,
        cls_token='middle',
        out_type='cls_token',
        out_feature='norm',
    ),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        in_channels=192,
        topk=(1, 5),
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02),
    ),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)
