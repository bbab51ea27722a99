# UPerNet on Vim-S as hustvl/Vim released it (44.9 mIoU, seg/scripts/ft_vim_small_upernet.sh): the
# residual stream, which turns with the rotary embedding, as features, and summed directions.
_base_ = [
    '../_base_/models/upernet_vim_s.py',
    '../_base_/datasets/ade20k_512x512.py',
    '../_base_/schedules/ade20k_released_60k.py',
    '../_base_/seg_runtime.py',
]

model = dict(
    backbone=dict(
        out_feature='residual',
        if_divide_out=False,
        if_rope=True,
        if_rope_residual=True,
        rope_grid=14,
        residual_in_fp32=True,
        discretization_method='zoh',
    )
)
# Half the rate and decay of the script for Vim-Ti, and a layer-wise decay of 0.95.
optim_wrapper = dict(
    paramwise_cfg=dict(
        custom_keys={
            'backbone.pos_embed': dict(lr_mult=0.95**25),
            'backbone.patch_embed.proj.weight': dict(lr_mult=0.95**25),
            'backbone.patch_embed.proj.bias': dict(lr_mult=0.95**25),
        },
    ),
    optimizer=dict(lr=1e-4, weight_decay=0.05),
)
