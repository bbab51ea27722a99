# Vim-B on ImageNet by the words of Vim's paper; see vim_t_zoh_paper.py.
_base_ = './vim_t_zoh_paper.py'

model = dict(backbone=dict(arch='base', drop_path_rate=0.1), head=dict(in_channels=768))
train_dataloader = dict(batch_size=32)
