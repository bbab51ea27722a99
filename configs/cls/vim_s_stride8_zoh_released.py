# Vim-S+ (81.6 top-1, hustvl/Vim, vim/scripts/ft-vim-s.sh): the model of vim_s_zoh_released.py with
# patches every 8 pixels in place of 16, by the values of Vim-Ti+, in batches of 1024 again. Start
# it from those weights: --cfg-options load_from=CHECKPOINT
_base_ = './vim_t_stride8_zoh_released.py'

model = dict(backbone=dict(arch='small'), head=dict(in_channels=384))
