"""What becomes of models when their job is over.

failure    of all of them, and what the error says      one_model  of one, and of its optimizers
of_job     when the job asks
"""
