"""Data-parallel pretraining: the arms of stage `pretrain_lordo`. Imports nothing."""
