"""Episodes of several turns: the model answers, tools or an environment respond, the model goes on."""
