# The recipe of Vim's paper (arXiv 2401.09417, appendix B): 380k iterations of 64 images, AdamW,
# linear decay. It names neither warmup nor layer-wise decay; both are the released code's.
optim_wrapper = dict(
    type='OptimWrapper',
    constructor='LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=0.837),
    optimizer=dict(type='AdamW', lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=250),
    # Multiplies the warmup, and ends with train_cfg.max_iters, whatever that is.
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False),
]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=380000, val_interval=20000)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
auto_scale_lr = dict(enable=False, base_batch_size=64)
