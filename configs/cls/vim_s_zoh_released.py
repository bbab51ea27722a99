# Vim-S on ImageNet as hustvl/Vim released it (80.5 top-1, vim/scripts/pt-vim-s.sh); see
# docs/classification.md. Its script has half of Vim-Ti's batch at the same learning rate,
# so twice the iterations.
_base_ = [
    '../_base_/models/vim_s.py',
    '../_base_/datasets/imagenet_224.py',
    '../_base_/schedules/imagenet_released_300e.py',
    '../_base_/cls_runtime.py',
]

model = dict(backbone=dict(discretization_method='zoh'))
optim_wrapper = dict(optimizer=dict(weight_decay=0.05))
# 2502 iterations of 512 images are an epoch.
param_scheduler = [
    dict(
        type='DeiTCosineLR',
        by_epoch=False,
        iters_per_epoch=2502,
        epochs=300,
        warmup_epochs=5,
        warmup_lr=1e-6,
        eta_min=1e-5,
    )
]
train_cfg = dict(max_iters=750600, val_interval=2502)
train_dataloader = dict(batch_size=64)
default_hooks = dict(checkpoint=dict(interval=2502, save_best='accuracy/top1'))
auto_scale_lr = dict(base_batch_size=512)
