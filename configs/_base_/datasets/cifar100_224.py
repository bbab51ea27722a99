# CIFAR-100, downloaded by MMPretrain, enlarged to the size of ImageNet's models.
data_root = 'data/cifar100'
train_dataloader = dict(
    batch_size=128,
    num_workers=8,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type='CIFAR100',
        data_root=data_root,
        split='train',
        pipeline=[
            dict(type='RandomCrop', crop_size=32, padding=4),
            dict(type='RandomFlip', prob=0.5),
            dict(type='Resize', scale=224, interpolation='bicubic'),
            dict(type='PackInputs'),
        ],
    ),
)
test_pipeline = [
    dict(type='Resize', scale=224, interpolation='bicubic'),
    dict(type='PackInputs'),
]
val_dataloader = dict(
    batch_size=128,
    num_workers=8,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='CIFAR100',
        data_root=data_root,
        split='test',
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='Accuracy', topk=(1, 5))
test_evaluator = val_evaluator
