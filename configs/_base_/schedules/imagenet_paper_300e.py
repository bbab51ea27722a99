# The recipe of Vim's paper (arXiv 2401.09417, section 4.1), DeiT's but for its rate and decay: 300
# epochs of ImageNet in batches of 1024, AdamW, cosine decay after a linear warmup of 5 epochs, and
# an exponential moving average of the weights, which is what is tested and saved.
optim_wrapper = dict(
    type='OptimWrapper',
    constructor='LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=1.0),
    optimizer=dict(type='AdamW', lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=6255),
    # Multiplies the warmup, and ends with train_cfg.max_iters, whatever that is.
    dict(type='CosineAnnealingLR', eta_min=0.0, by_epoch=False),
]
# 1251 iterations are an epoch.
train_cfg = dict(type='IterBasedTrainLoop', max_iters=375300, val_interval=12510)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
custom_hooks = [dict(type='EMAHook', momentum=4e-5, priority='ABOVE_NORMAL')]
auto_scale_lr = dict(enable=False, base_batch_size=1024)
