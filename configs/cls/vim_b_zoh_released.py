# Vim-B on ImageNet (81.9 top-1). hustvl/Vim released its weights but no script for them: these are
# the values of the script for Vim-S; see docs/classification_recipes.md.
_base_ = './vim_t_zoh_released.py'

model = dict(backbone=dict(arch='base', drop_path_rate=0.05), head=dict(in_channels=768))
optim_wrapper = dict(optimizer=dict(weight_decay=0.05))
train_dataloader = dict(batch_size=32)
