_base_ = './upernet_vim_t.py'

model = dict(
    backbone=dict(arch='base'),
    neck=dict(embed_dim=768),
    decode_head=dict(in_channels=[768, 768, 768, 768], channels=768),
    auxiliary_head=dict(in_channels=768),
)
