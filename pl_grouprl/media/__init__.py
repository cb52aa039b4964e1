"""Images and videos, from a data set's row to the model's arguments.

    rows    the data side: open and decode a row's media, find their places in a prompt, load the model's processor;
            `MediaPrompt` is processed when the prompt is sampled, and not kept
    inputs  the model side: checks, the model's arguments for one prompt, rotary positions in time, height and width

docs/images.md says what rows contain.
"""
