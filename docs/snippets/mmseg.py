_base_ = 'mmseg::upernet/upernet_r50_4xb4-160k_ade20k-512x512.py'
custom_imports = dict(imports=['vim_mm'])
model = dict(
    pretrained=None,
    backbone=dict(
        _delete_=True,
        type='VisionMamba',
        arch='tiny',
        img_size=512,
        out_indices=(5, 11, 17, 23),
        discretization_method='bilinear',
    ),
    neck=dict(type='Feature2Pyramid', embed_dim=192, rescales=[4, 2, 1, 0.5]),
    decode_head=dict(in_channels=[192, 192, 192, 192]),
    auxiliary_head=dict(in_channels=192),
)
optim_wrapper = dict(
    # Leaves A_log, D, pos_embed, norms and biases without weight decay; MMEngine's own does not.
    constructor='LayerDecayOptimWrapperConstructor',
    optimizer=dict(_delete_=True, type='AdamW', lr=6e-5, weight_decay=0.01),
)
param_scheduler = [
    # MMSegmentation's own schedule ends at 1e-4, which is more than this learning rate.
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False),
]
