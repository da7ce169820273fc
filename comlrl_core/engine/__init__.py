"""How a model is trained: one small protocol, and the engines that fulfil it."""
