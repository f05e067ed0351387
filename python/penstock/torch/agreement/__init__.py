"""What is the same on all ranks, and how they find out where it is not.

arguments        what `penstock.distribute` is given       copies     one rank's tensors to all
hyperparameters  an optimizer's, as facts to compare       drift      digests of parameters, every so many steps
batchnorm        statistics over the samples of all ranks
"""
