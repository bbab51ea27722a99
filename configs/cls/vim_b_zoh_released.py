# Vim-B on ImageNet (81.9 top-1). hustvl/Vim released its weights but no script for them: these are
# the values of the script for Vim-S, its batch included; see docs/classification.md.
_base_ = './vim_s_zoh_released.py'

model = dict(backbone=dict(arch='base'), head=dict(in_channels=768))
train_dataloader = dict(batch_size=32)
