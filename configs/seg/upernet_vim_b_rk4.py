_base_ = './upernet_vim_b_zoh.py'

model = dict(backbone=dict(discretization_method='rk4'))
