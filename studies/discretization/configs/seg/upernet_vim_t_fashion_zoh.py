# Vim-Ti on scenes of garments, from random weights, to be compared with the other *_t_fashion.py:
# the same pyramid of strides 4 to 32, heads and schedule.
_base_ = './upernet_vim_fashion.py'

model = dict(
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=192, num_layers=24),
        patch_size=8,
        out_indices=(5, 11, 17, 23),
    ),
    neck=dict(embed_dim=192),
    decode_head=dict(in_channels=[192, 192, 192, 192], channels=192),
    auxiliary_head=dict(in_channels=192, channels=128),
)
optim_wrapper = dict(
    optimizer=dict(lr=1e-3),
    paramwise_cfg=dict(
        # Vim marks its own. Norms and biases, of one dimension, do not decay anyway.
        custom_keys={
            'cls_token': dict(decay_mult=0.0),
            'pos_embed': dict(decay_mult=0.0),
            'relative_position_bias_table': dict(decay_mult=0.0),
        },
    ),
)
