# Fashion-MNIST for comparisons: 50 epochs in batches of 256, AdamW, cosine decay after a linear
# warmup of 2 epochs; the same for every backbone.
optim_wrapper = dict(
    type='OptimWrapper',
    constructor='LayerDecayOptimWrapperConstructor',
    optimizer=dict(type='AdamW', lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(
        # Vim marks its own. Norms and biases, of one dimension, do not decay anyway.
        custom_keys={
            'cls_token': dict(decay_mult=0.0),
            'pos_embed': dict(decay_mult=0.0),
            'relative_position_bias_table': dict(decay_mult=0.0),
        },
    ),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-2, by_epoch=False, begin=0, end=468),
    # Multiplies the warmup, and ends with train_cfg.max_iters, whatever that is.
    dict(type='CosineAnnealingLR', eta_min=0.0, by_epoch=False),
]
# 234 iterations are an epoch.
train_cfg = dict(type='IterBasedTrainLoop', max_iters=11700, val_interval=1170)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
auto_scale_lr = dict(enable=False, base_batch_size=256)
