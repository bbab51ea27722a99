# Scenes of garments (python -m vim_mm.datasets.fashion) in COCO's layout.
_base_ = '../../../../../configs/_base_/datasets/shapes_det.py'

data_root = 'data/fashion/scenes'
metainfo = dict(
    classes=(
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
        (245, 130, 49),
        (145, 30, 180),
        (191, 239, 69),
        (250, 190, 212),
    ],
)
train_dataloader = dict(
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
            dict(type='RandomFlip', prob=0.5),
            dict(type='PackDetInputs'),
        ],
    ),
)
test_pipeline = [
    dict(type='LoadImageFromFile'),
    # Scales by 1: the metric asks for the factor that only Resize notes.
    dict(type='Resize', scale_factor=1.0, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
val_dataloader = dict(
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=f'{data_root}/annotations/instances_val2017.json')
test_evaluator = val_evaluator
