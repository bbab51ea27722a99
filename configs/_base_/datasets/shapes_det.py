# The built-in shapes (python -m vim_mm.datasets.shapes) in COCO's layout, at half their size as in
# shapes_seg.py.
_base_ = './coco_lsj_1024x1024.py'

data_root = 'data/shapes'
metainfo = dict(
    classes=('circle', 'square', 'triangle', 'star', 'ring', 'cross'),
    palette=[
        (230, 25, 75),
        (67, 99, 216),
        (60, 180, 75),
        (255, 225, 25),
        (240, 50, 230),
        (66, 212, 244),
    ],
)
train_dataloader = dict(
    batch_size=8,
    num_workers=1,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
            dict(type='Resize', scale=(64, 64), keep_ratio=True),
            dict(type='RandomFlip', prob=0.5),
            dict(type='PackDetInputs'),
        ],
    ),
)
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(64, 64), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
val_dataloader = dict(
    num_workers=1,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=f'{data_root}/annotations/instances_val2017.json', classwise=True)
test_evaluator = val_evaluator
