_base_ = './upernet_vim_s_zoh.py'

model = dict(backbone=dict(discretization_method='rk4'))
