_base_ = './upernet_vim_t_zoh.py'

model = dict(backbone=dict(discretization_method='zoh_exact'))
