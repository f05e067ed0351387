"""The lab: emulated clusters, the papers' networks, real peers, and the distance to the limit."""
