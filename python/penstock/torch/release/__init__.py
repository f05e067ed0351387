"""What becomes of models when their job is over.

of_job     when the job asks
failure    of all models, and what the error says
one_model  of one, and of its optimizers
"""
