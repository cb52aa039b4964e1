"""The runs of the telephone directory in the small."""

SMALL_LOOKUP = """
model:
  init_args:
    policy:
      init_args:
        architecture: {{model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
          num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8, max_position_embeddings: 256}}
        steps: 60
        batch_size: 8
        learning_rate: 1.0e-2
        cache_dir: {folder}/cache
        progress_bar: false
    num_generations: 4
    evaluation: {{num_generations: 1}}
data:
  init_args: {{batch_size: 4, val_batch_size: 8, val: {{init_args: {{val_size: 8}}}}}}
trainer: {{max_steps: 3, val_check_interval: 3, enable_progress_bar: false}}
"""
"""A configuration over theirs; its braces are doubled, and `folder` is to be filled in."""
