# The recipe of Vim's paper (arXiv 2401.09417, appendix B): 160k iterations of 16 images, AdamW,
# linear decay after a linear warmup of 1500 iterations. It names no layer-wise decay; the
# constructor is here for the parameters that take no weight decay.
optim_wrapper = dict(
    type='OptimWrapper',
    constructor='LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=1.0),
    optimizer=dict(type='AdamW', lr=6e-5, betas=(0.9, 0.999), weight_decay=0.01),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    # Multiplies the warmup, and ends with train_cfg.max_iters, whatever that is.
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False),
]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=160000, val_interval=16000)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
auto_scale_lr = dict(enable=False, base_batch_size=16)
