"""Local updates: every rank trains by itself, and they meet now and then. Not the results of synchronous training.

local_sgd          parameters are averaged
diloco             an outer optimizer takes what ranks have trained
elastic            ranks are drawn to a common centre
local_steps        what these have in common: steps, rounds, state
schedule           when which fragment meets; pure
common_values      what ranks have alike, and how a round changes it
shortened_updates  the same where values travel in fewer bytes
encoding           numbers as those bytes; pure
group_gradients    gradients averaged inside a group
left_out           whose parameters are not finite
checking           what is refused at the call
"""
