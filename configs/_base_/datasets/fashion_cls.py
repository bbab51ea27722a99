# Fashion-MNIST (python -m vim_mm.datasets.fashion), a folder a class.
data_root = 'data/fashion/classes'
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
)
train_dataloader = dict(
    batch_size=256,
    num_workers=4,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type='CustomDataset',
        data_root=data_root,
        data_prefix='train',
        metainfo=metainfo,
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='RandomCrop', crop_size=28, padding=2),
            dict(type='RandomFlip', prob=0.5),
            dict(type='RandomErasing', erase_prob=0.25, mode='const', fill_color=[0, 0, 0]),
            dict(type='PackInputs'),
        ],
    ),
)
test_pipeline = [
    dict(type='LoadImageFromFile'),
    # What infer.py draws over may have any size; the data set's pictures stay as they are.
    dict(type='Resize', scale=28),
    dict(type='PackInputs'),
]
val_dataloader = dict(
    batch_size=250,
    num_workers=1,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='CustomDataset',
        data_root=data_root,
        data_prefix='test',
        metainfo=metainfo,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='Accuracy', topk=(1,))
test_evaluator = val_evaluator
