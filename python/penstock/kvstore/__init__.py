"""A key-value store for programs that say by themselves what is synchronised, and when. See `penstock.KVStore`.

store        what programs call
pending      the future of a call
checks       what programs give to a store
books        in which its keys travel, and by which rules
stored_keys  one key: its value, and what waits for it
rounds       what is under way for a key, and what its result means
meeting      where all ranks must agree
arithmetic   sums that a rank takes by itself
kept         values that their owners keep
states       what a program saves and loads
saving       files, by rank 0 for all ranks
disk         what is in a file
"""

from penstock.kvstore.store import KVStore

__all__ = ["KVStore"]
