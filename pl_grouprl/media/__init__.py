"""Images and videos, from the row of a data set to the arguments of a model.

    images          open and decode what a row holds: PIL images, paths, bytes
      -> places     where they stand in a prompt: parts, tags, the model's own tokens
      -> processor  load the model's processor, check its options
      -> prompts    MediaPrompt: processed when the prompt is sampled, and not kept
      -> inputs     what a model takes: checks, and the arguments for one prompt
      -> positions  rotary positions of prompts and rollouts in time, height and width

docs/vision_language.md draws the whole path, with what packing and engines do in between.
"""
