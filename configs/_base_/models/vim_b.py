_base_ = './vim_t.py'

model = dict(backbone=dict(arch='base', drop_path_rate=0.1), head=dict(in_channels=768))
