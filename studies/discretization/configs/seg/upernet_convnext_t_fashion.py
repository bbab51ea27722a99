# ConvNeXt-T, MMPretrain's, in place of Vim-Ti.
_base_ = './upernet_vim_t_fashion_zoh.py'
custom_imports = dict(imports=['vim_mm', 'mmpretrain.models'])

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmpretrain.ConvNeXt',
        arch='tiny',
        out_indices=(0, 1, 2, 3),
        gap_before_final_norm=False,
        drop_path_rate=0.1,
    ),
    neck=None,
    decode_head=dict(in_channels=[96, 192, 384, 768]),
    auxiliary_head=dict(in_channels=384),
)
