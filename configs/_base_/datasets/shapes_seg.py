# The built-in shapes (python -m vim_mm.datasets.shapes) in ADE20K's layout, at half their size:
# a quarter of the tokens, and a model without a GPU learns in minutes.
_base_ = './ade20k_512x512.py'

data_root = 'data/shapes'
metainfo = dict(
    classes=('background', 'circle', 'square', 'triangle', 'star', 'ring', 'cross'),
    palette=[
        [60, 60, 60],
        [230, 25, 75],
        [67, 99, 216],
        [60, 180, 75],
        [255, 225, 25],
        [240, 50, 230],
        [66, 212, 244],
    ],
)
train_dataloader = dict(
    batch_size=8,
    num_workers=1,
    dataset=dict(
        # ADE20KDataset insists on ADE20K's 150 classes.
        type='BaseSegDataset',
        data_root=data_root,
        metainfo=metainfo,
        reduce_zero_label=True,
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations'),
            dict(type='Resize', scale=(64, 64), keep_ratio=True),
            dict(type='RandomFlip', prob=0.5),
            dict(type='PackSegInputs'),
        ],
    ),
)
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(64, 64), keep_ratio=True),
    dict(type='LoadAnnotations'),
    dict(type='PackSegInputs'),
]
val_dataloader = dict(
    num_workers=1,
    dataset=dict(
        type='BaseSegDataset',
        data_root=data_root,
        metainfo=metainfo,
        reduce_zero_label=True,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
