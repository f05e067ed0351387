"""A key-value store for programs that say by themselves what is synchronised, and when. See `penstock.KVStore`.

store       what programs call                           checks   what they give to it
stored_keys one key: its value, and what waits for it    rounds   what is under way, and what its result means
arithmetic  sums that a rank takes by itself             meeting  where all ranks must agree
kept        values that their owners keep                disk     how a file is whole
states      what a program saves and loads               saving   files, by rank 0 for all ranks
pending     the future of a call
"""

from penstock.kvstore.store import KVStore

__all__ = ["KVStore"]
