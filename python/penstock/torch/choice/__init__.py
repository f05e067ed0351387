"""Schemes chosen while training.

measuring  facts gathered at the same steps on all ranks
network    a model as the coordinator sees it
probe      what an exchange of rows costs beyond its bytes
"""
