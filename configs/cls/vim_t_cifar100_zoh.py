# Vim-Ti on CIFAR-100 for 100 epochs. From the weights of ImageNet, by --cfg-options or in a config
# of your own: model.backbone.init_cfg = dict(type='Pretrained', checkpoint=..., prefix='backbone.')
_base_ = [
    '../_base_/models/vim_t.py',
    '../_base_/datasets/cifar100_224.py',
    '../_base_/schedules/imagenet_paper_300e.py',
    '../_base_/cls_runtime.py',
]

model = dict(
    # MMPretrain's CIFAR-100 is RGB.
    data_preprocessor=dict(num_classes=100, to_rgb=False),
    backbone=dict(discretization_method='zoh'),
    head=dict(num_classes=100),
)
optim_wrapper = dict(optimizer=dict(lr=5e-4))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=485),
    dict(type='CosineAnnealingLR', eta_min=0.0, by_epoch=False),
]
# 97 iterations of 512 images are an epoch.
train_cfg = dict(max_iters=9700, val_interval=970)
custom_hooks = []
auto_scale_lr = dict(base_batch_size=512)
