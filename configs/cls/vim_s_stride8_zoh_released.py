# Vim-S+ (81.6 top-1, hustvl/Vim, vim/scripts/ft-vim-s.sh): the model of vim_s_zoh_released.py with
# patches every 8 pixels in place of 16, for 30 epochs at the one rate of 1e-5. Start it from those
# weights: --cfg-options load_from=CHECKPOINT
_base_ = './vim_s_zoh_released.py'

model = dict(backbone=dict(stride=8, drop_path_rate=0.0))
optim_wrapper = dict(optimizer=dict(lr=1e-5, weight_decay=1e-8))
param_scheduler = []
train_cfg = dict(max_iters=37530)
train_dataloader = dict(batch_size=16)
