"""Metrics: what this rank counts, for a Prometheus. The option ``metrics`` of `penstock.init` asks for them.

exporting       where they are to be found, at which port or in which file, from the job's start to its end
exposition      the HTTP server that is scraped, the file that is written: prometheus_client's, with their lives
families        which metrics there are, read off the engine when they are asked for
step_histogram  how long steps take
"""
