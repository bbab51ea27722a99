# The recipe of Vim's released classifiers (hustvl/Vim at dd0358a, vim/main.py and
# vim/scripts/pt-vim-t.sh), DeiT's, as it took effect: 300 epochs of ImageNet in batches of 1024, in
# float32. Its rates follow the number of the epoch before, so the first two epochs are at 1e-6.
#
# timm exempts from weight decay what has one dimension, the position embedding and the class token.
# The mark that Mamba's authors put on A_log is not read there: A_log decays.
#
# The training keeps a moving average of the weights, but what is tested and published is the
# weights themselves, of the best epoch.
optim_wrapper = dict(
    type='OptimWrapper',
    constructor='LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(
        layer_decay_rate=1.0,
        marked_decay_mult=1.0,
        custom_keys={
            'backbone.pos_embed': dict(decay_mult=0.0),
            'backbone.cls_token': dict(decay_mult=0.0),
        },
    ),
    optimizer=dict(type='AdamW', lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1),
)
# 1251 iterations are an epoch, whose last images, less than a batch, are dropped.
param_scheduler = [
    dict(
        type='DeiTCosineLR',
        by_epoch=False,
        iters_per_epoch=1251,
        epochs=300,
        warmup_epochs=5,
        warmup_lr=1e-6,
        eta_min=1e-5,
    )
]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=375300, val_interval=1251)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
custom_hooks = [dict(type='SideEMAHook', momentum=4e-5)]
auto_scale_lr = dict(enable=False, base_batch_size=1024)
