"""What is the same on all ranks, and how they find out where it is not.

arguments        what `penstock.distribute` is given
devices          on which device a model is
fingerprint      the model, as ranks compare it
hyperparameters  an optimizer's, as facts to compare
copies           one rank's tensors to all
drift            digests of parameters, every so many steps
batchnorm        statistics over the samples of all ranks
"""
