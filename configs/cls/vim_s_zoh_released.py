# Vim-S on ImageNet as hustvl/Vim released it (80.5 top-1, vim/scripts/pt-vim-s.sh); see
# docs/classification_recipes.md.
_base_ = './vim_t_zoh_released.py'

model = dict(backbone=dict(arch='small', drop_path_rate=0.05), head=dict(in_channels=384))
optim_wrapper = dict(optimizer=dict(weight_decay=0.05))
train_dataloader = dict(batch_size=64)
