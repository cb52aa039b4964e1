"""Images and videos, from a data set's row to the model's arguments.

    images          open and decode a row's media: PIL images, paths, bytes
      -> places     their places in a prompt: parts, tags, the model's tokens
      -> processor  load the model's processor, check its options
      -> prompts    MediaPrompt: processed when the prompt is sampled, and not kept
      -> inputs     checks, and the model's arguments for one prompt
      -> positions  rotary positions of prompts and rollouts in time, height and width

docs/vision_language.md draws the whole path, including packing and engines.
"""
