_base_ = './cascade_mask_rcnn_vim_t_zoh.py'

model = dict(backbone=dict(discretization_method='zoh_exact'))
