"""Rollouts with a transformers decoder, in the trainer's process and on its weights."""
