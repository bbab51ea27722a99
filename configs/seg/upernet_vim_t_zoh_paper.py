# UPerNet on Vim-Ti by the words of Vim's paper (arXiv 2401.09417, appendix B). Of the parameter
# groups it says nothing: as in the released code, the position embedding and A_log decay.
_base_ = './upernet_vim_t_zoh.py'

optim_wrapper = dict(paramwise_cfg=dict(marked_decay_mult=1.0))
