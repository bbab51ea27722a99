# Segmenter's linear decoder (arXiv 2105.05633) on Vim-Ti: one layer from the last tokens to the
# classes. The Fast types as in upernet_vim_t.py.
_base_ = './upernet_vim_t.py'

model = dict(
    backbone=dict(out_indices=(23,), out_feature='norm'),
    neck=None,
    decode_head=dict(
        _delete_=True,
        type='FastFCNHead',
        in_channels=192,
        channels=192,
        num_convs=0,
        concat_input=False,
        dropout_ratio=0.0,
        num_classes=150,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    ),
    auxiliary_head=None,
)
