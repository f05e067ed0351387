"""Local updates: every rank trains by itself, and they meet now and then. Not the results of synchronous training.

local_sgd  parameters are averaged               diloco        an outer optimizer takes what ranks have trained
schedule   when which fragment meets, and what   common_values what ranks have alike, and how a round changes it
elastic    ranks are drawn to a common centre    group_gradients gradients averaged inside a group
checking   what is refused at the call           local_steps   what all have in common: steps, rounds, state
left_out   whose parameters are not finite       shortened_updates, encoding   values that travel in fewer bytes
"""
