_base_ = './mask_rcnn_vim_fashion_zoh.py'

model = dict(backbone=dict(discretization_method='poly'))
