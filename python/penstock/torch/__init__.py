"""The PyTorch front end. Importing this package imports nothing: `penstock.calling` needs some of it, and not all.

front_end     what programs find of all this in `penstock`
distribute    the entry
distributed   what belongs to one distributed model
alone         a job of one process
access        what a program calls on all models
facts         what it may ask of one
join          uneven numbers of batches
sampling      which samples are this rank's
elastic_sampling  the same where ranks may be lost
newcomers         where new workers come in, and what they are told
state_tree        what objects have of state, taken apart
clipping      what is done to gradients before a step
checkpoints   of a training, written by all ranks while it goes on
checkpoint_content  what they are of
checkpoint_shares   what each rank writes of it, and how parts become one again
checkpoint_reading  how one is found and read
random_states       where a rank's random numbers go on
model         layers and parameters, patches
reads         who reads which parameter
gradients     gradients in, averages back
updates       updates out, layer by layer
schemes       averages that every rank makes
choice        schemes chosen while training
agreement     what is the same on all ranks
release       what becomes of models when the job is over
runtime       memory used again, threads, what is asked of an accelerator
calls         messages and collectives on tensors of an accelerator
backend       for torch.distributed
registration  the backend, made known to torch
ddp           in the place of `DistributedDataParallel`
local         ranks that train by themselves, and meet now and then
"""
