"""Episodes of several turns: the model writes, tools or an environment respond, and the model continues."""
