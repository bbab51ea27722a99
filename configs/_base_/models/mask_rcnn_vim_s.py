_base_ = './mask_rcnn_vim_t.py'

model = dict(backbone=dict(arch='small'), neck=dict(in_channels=384))
