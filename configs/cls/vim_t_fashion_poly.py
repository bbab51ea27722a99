_base_ = './vim_t_fashion_zoh.py'

model = dict(backbone=dict(discretization_method='poly'))
