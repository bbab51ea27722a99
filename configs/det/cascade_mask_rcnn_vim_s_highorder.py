_base_ = './cascade_mask_rcnn_vim_s_zoh.py'

model = dict(backbone=dict(discretization_method='highorder'))
