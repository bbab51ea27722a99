_base_ = './vim_t.py'

model = dict(backbone=dict(arch='small', drop_path_rate=0.05), head=dict(in_channels=384))
