# COCO 2017 as detectron2 feeds the released detector: Pillow resizes, which smooths where it
# shrinks; masks stay polygons; crops without objects and small pictures are kept.
_base_ = './coco_lsj_1024x1024.py'

train_dataloader = dict(
    dataset=dict(
        filter_cfg=dict(filter_empty_gt=True, min_size=0),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', with_bbox=True, with_mask=True, poly2mask=False),
            dict(type='RandomFlip', prob=0.5),
            dict(
                type='RandomResize',
                scale=(1024, 1024),
                ratio_range=(0.1, 2.0),
                keep_ratio=True,
                backend='pillow',
            ),
            dict(
                type='RandomCrop',
                crop_type='absolute_range',
                crop_size=(1024, 1024),
                recompute_bbox=True,
                allow_negative_crop=True,
            ),
            dict(type='FilterAnnotations', min_gt_bbox_wh=(1e-5, 1e-5), keep_empty=False),
            dict(type='PackDetInputs'),
        ],
    ),
)
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(1024, 1024), keep_ratio=True, backend='pillow'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
val_dataloader = dict(
    dataset=dict(
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
