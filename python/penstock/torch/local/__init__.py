"""Local updates: every rank trains by itself, and they meet now and then. Not the results of synchronous training.

local_sgd  parameters are averaged               diloco        an outer optimizer takes what ranks have trained
schedule   when which fragment meets, and what   common_values what ranks have alike, and how a round changes it
checking   what is refused at the call           local_steps   what both have in common: steps, rounds, state
"""
