_base_ = './upernet_vim_t.py'

model = dict(
    backbone=dict(arch='small'),
    neck=dict(embed_dim=384),
    decode_head=dict(in_channels=[384, 384, 384, 384], channels=384),
    auxiliary_head=dict(in_channels=384),
)
