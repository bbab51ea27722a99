_base_ = 'mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py'
custom_imports = dict(imports=['vim_mm'])
model = dict(
    backbone=dict(
        _delete_=True,
        type='VisionMamba',
        arch='tiny',
        out_feature='residual',
        discretization_method='bilinear',
    ),
    neck=dict(_delete_=True, type='SimpleFPN', in_channels=192, out_channels=256, num_outs=5),
)
optim_wrapper = dict(
    # Leaves A_log, D, pos_embed, norms and biases without weight decay; MMEngine's own does not.
    constructor='LayerDecayOptimWrapperConstructor',
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-4, weight_decay=0.1),
)
