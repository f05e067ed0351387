"""``penstock top``: how the ranks of a running job stand.

live_status  what a rank writes, once a second, with the option ``status``
live_view    what such files say together; pure but for reading them
live_table   that as tables for a terminal
top_command  the command
"""
