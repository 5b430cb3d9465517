"""Servers of reward models that streamrl starts: one role each, `reward_model.NAME.N`."""
