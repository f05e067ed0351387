"""Which scheme each layer of a model uses: what ranks agree on first, and what is chosen while training.

layer_schemes  what all layers may use and do use, and how that changes
measuring  facts gathered at the same steps on all ranks
network    a model as the coordinator sees it
probe      what an exchange of rows costs beyond its bytes
"""
