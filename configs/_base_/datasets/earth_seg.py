# Climate zones of the Earth from space (python -m vim_mm.datasets.earth) in ADE20K's layout.
_base_ = './ade20k_512x512.py'

data_root = 'data/earth'
metainfo = dict(
    classes=('ocean', 'humid', 'arid', 'polar'),
    palette=[[0, 114, 178], [0, 158, 115], [230, 159, 0], [170, 130, 210]],
)
train_dataloader = dict(
    batch_size=8,
    num_workers=1,
    dataset=dict(
        # ADE20KDataset insists on ADE20K's 150 classes.
        type='BaseSegDataset',
        data_root=data_root,
        metainfo=metainfo,
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations'),
            dict(type='RandomResize', scale=(300, 300), ratio_range=(0.9, 1.6), keep_ratio=True),
            dict(type='FastRandomCrop', crop_size=(128, 128), cat_max_ratio=0.9),
            dict(type='RandomFlip', prob=0.5),
            # From above every direction is as good as another.
            dict(type='RandomFlip', prob=0.5, direction='vertical'),
            dict(
                type='PhotoMetricDistortion',
                brightness_delta=12,
                contrast_range=(0.8, 1.25),
                saturation_range=(0.8, 1.25),
                hue_delta=6,
            ),
            dict(type='PackSegInputs'),
        ],
    ),
)
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='PackSegInputs'),
]
# The held-out tiles ship with the model.
val_dataloader = dict(
    num_workers=1,
    dataset=dict(
        type='BaseSegDataset',
        data_root='demo/earth',
        data_prefix=dict(img_path='images', seg_map_path='annotations'),
        metainfo=metainfo,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
