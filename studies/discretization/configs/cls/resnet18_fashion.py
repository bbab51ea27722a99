# ResNet-18 with the stem for small images, by the recipe of vim_t_fashion.py.
_base_ = './vim_t_fashion.py'

model = dict(
    backbone=dict(_delete_=True, type='ResNet_CIFAR', depth=18, num_stages=4, out_indices=(3,)),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(in_channels=512),
)
