"""Asynchronous pipeline pretraining: stages that never wait for a flush. Imports nothing."""
