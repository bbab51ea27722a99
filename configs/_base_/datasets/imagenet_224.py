# ImageNet-1k in MMPretrain's layout; DeiT's augmentation, each image three times in a batch.
_base_ = 'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py'

data_root = 'data/imagenet'
train_dataloader = dict(
    # Images that fit a GPU at once; the recipe's batch is auto_scale_lr.base_batch_size.
    batch_size=128,
    num_workers=8,
    sampler=dict(type='RepeatAugSampler', shuffle=True, num_repeats=3),
    dataset=dict(data_root=data_root),
)
val_dataloader = dict(batch_size=128, num_workers=8, dataset=dict(data_root=data_root))
test_dataloader = val_dataloader
