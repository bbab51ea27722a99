_base_ = './upernet_vim_fashion_zoh.py'

model = dict(backbone=dict(discretization_method='zoh_exact'))
