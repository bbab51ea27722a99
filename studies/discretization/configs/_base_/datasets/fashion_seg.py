# Scenes of garments (python -m vim_mm.datasets.fashion) in ADE20K's layout.
_base_ = '../../../../../configs/_base_/datasets/shapes_seg.py'

data_root = 'data/fashion/scenes'
metainfo = dict(
    classes=(
        'ground',
        'T-shirt',
        'trouser',
        'pullover',
        'dress',
        'coat',
        'sandal',
        'shirt',
        'sneaker',
        'bag',
        'ankle boot',
    ),
    palette=[
        *_base_.metainfo.palette,
        [245, 130, 49],
        [145, 30, 180],
        [191, 239, 69],
        [250, 190, 212],
    ],
)
train_dataloader = dict(
    batch_size=16,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations'),
            dict(type='RandomFlip', prob=0.5),
            dict(type='PackSegInputs'),
        ],
    ),
)
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='PackSegInputs'),
]
val_dataloader = dict(
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
